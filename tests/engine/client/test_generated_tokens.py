"""What servers generated, and no answer brought, is known of embedded servers."""

from arl.api.events import IterationSums, ServerWorked
from arl.engine.client.generated_tokens import GeneratedTokens


def told(server: str, decoded: float, begun: float = 0.0) -> ServerWorked:
    one = IterationSums(reads=False, number=1, decoded=decoded, context=0, prompt=0, begun=begun, seconds=0.1)
    return ServerWorked(server=server, iterations=[one, one])


def test_tokens_are_counted_from_the_first_pause_on_over_servers_and_their_restarts() -> None:
    generated = GeneratedTokens()
    assert generated.total is None
    for worked, total in [
        (told("a", 50), 0),
        (told("a", 60, 5), 30),
        (told("b", 0), 30),
        (told("b", 7), 44),
        (told("b", 2), 48),
        (told("a", 60, 5), 48),
    ]:
        generated.note(worked)
        assert generated.total == total
