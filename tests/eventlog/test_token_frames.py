"""The tokens of a frame are found without looking at the rows before them."""

from pathlib import Path
from typing import SupportsIndex

from records import trajectory

from arl.api.config import EventsConfig
from arl.api.events import EpisodeBegan, KeptTokens
from arl.eventlog.records import token_record
from arl.eventlog.run_record import read_run
from arl.eventlog.segments import TokenRow
from arl.eventlog.writer import EventLog


class Watched(list[TokenRow]):
    """Counts the rows that are looked at."""

    num_seen = 0

    def __getitem__(self, place: SupportsIndex | slice):  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super().__getitem__(place)
        self.num_seen += len(found) if isinstance(found, list) else 1
        return found


def test_a_row_of_a_frame_is_read_without_looking_at_the_others(tmp_path: Path):
    names = [f"0.{number}" for number in range(100)]
    with EventLog(tmp_path, EventsConfig()).open() as log:
        for name in names:
            log.emit(EpisodeBegan(episode=name))
        log.keep(KeptTokens(rows=[(name, 0, trajectory(versions=(i,) * i)) for i, name in enumerate(names)]))
    run = read_run(tmp_path)
    life, segment, offset, _ = run.episodes[0].places[0]
    frame = run.files.tokens(life, segment, offset)
    rows = Watched(frame.rows)
    for place in range(100):
        found = token_record(frame._replace(rows=rows), place)
        assert found.columns["versions"].tolist() == [-1, *[place] * place]
    assert rows.num_seen == 100
