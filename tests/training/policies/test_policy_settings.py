"""Settings of policies that cannot be: one clear error each, before anything starts."""

from typing import Any

import pytest
from pair_of_agents import Pair

from arl.api.errors import ConfigError, RoleError
from arl.api.settings.run import Config
from arl.run.inputs import Given, check_settings, given_tasks
from arl.run.servers import of_policy

TWO = {"writer": {"roles": ["author"]}, "reader": {"roles": ["critic"]}}
LORA = {"weights": {"transport": "adapter"}, "train": {"lora": {}}}
SGLANG = {"kind": "sglang", "addresses": ["http://127.0.0.1:1"]}


def settings(policies: Any = TWO, **others: Any) -> Config:
    return Config.model_validate({"model": "m", "policies": policies, **others})


@pytest.mark.parametrize(
    ("policies", "others", "said"),
    [
        ({"a/b": {"roles": ["x"]}}, {}, "a policy is named 'a/b'; a name has letters"),
        ({"a": {"roles": ["x", "y"]}, "b": {"roles": ["y"]}}, {}, "the role 'y' is claimed 2 times, by policies a, b"),
        ({"a": {"roles": ["x", "x"]}}, {}, "the role 'x' is claimed 2 times, by policies a"),
        ({"a": {"roles": []}}, {}, "should have at least 1 item"),
        ({"a": {}}, {}, "Field required"),
        (TWO, {"record": True}, "record is for runs of one policy, and this one has 2"),
        (TWO, {"engine": {"colocated": True}}, r"engine\.colocated is for runs of one policy"),
        (TWO, {"weights": {"transport": "distributed"}}, "weights.transport is distributed, which brings the weights"),
        (TWO, {"train": {"num_ranks": 2}}, r"train\.num_ranks above 1 is for runs of one policy"),
        (TWO, {"algorithm": {"preset": "prime"}}, r"algorithm\.reward_model is for runs of one policy"),
        ({"a": {"roles": ["x"], "model": "other"}}, LORA, r"policies\.a\.model is set, but with weights\.transport=ad"),
        ({"a": {"roles": ["x"], "addresses": ["http://h:1"]}}, {}, r"policies\.a\.addresses is set, but arl starts"),
        (TWO, {"engine": SGLANG}, "http://127.0.0.1:1 would serve 2 policies, and holds one's weights"),
        (
            {**TWO, "reader": {"roles": ["critic"], "addresses": ["http://h:9"]}},
            {"engine": {**SGLANG, "addresses": ["http://h:1", "http://h:2"], "min_servers": 2}},
            r"engine\.min_servers is 2, but policies\.reader has 1 of them; lower it",
        ),
        (TWO, {"engine": {**SGLANG, "servers_file": "s"}}, r"engine\.servers_file names servers of one policy"),
    ],
)
def test_settings_that_contradict_several_policies_are_named(policies: Any, others: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings(policies, **others)


@pytest.mark.parametrize(
    ("roles", "error", "said"),
    [
        (("author",), ConfigError, r"the policy reader would never be asked: it plays critic, .* workflow are author;"),
        (("author", "critic", "judge"), RoleError, r"no policy plays the role 'judge'; .* author \(writer\), critic"),
    ],
)
def test_roles_that_do_not_fit_the_workflow_are_named_before_the_start(
    roles: tuple[str, ...], error: type[Exception], said: str
) -> None:
    given = given_tasks(Given(workflow=Pair(roles), dataset=[{"question": "?"}]))
    with pytest.raises(error, match=said):
        check_settings(settings(), given)


def test_each_policy_has_its_own_model_learning_rate_devices_and_files() -> None:
    config = settings(
        {"a": {"roles": "x"}, "b": {"roles": ["y"], "model": "other", "lr": 0.5, "device": "cuda:1"}},
        run_dir="runs/two",
    )
    first, second = of_policy(config, "a"), of_policy(config, "b")
    assert (first.model, first.train, first.engine) == (config.model, config.train, config.engine)
    assert (second.model, second.train.optimizer.lr, second.train.device) == ("other", 0.5, "cuda:1")
    assert second.engine.device == "cuda:1"
    assert [str(one.run_dir) for one in (first, second)] == ["runs/two/policies/a", "runs/two/policies/b"]
    assert not first.policies


def test_stock_servers_of_one_policy_get_other_gpus_than_those_of_another() -> None:
    engine = {"kind": "sglang_processes", "num_servers": 2, "gpus_per_server": 2, "first_gpu": 1}
    config = settings(engine=engine)
    assert [of_policy(config, name).engine.first_gpu for name in config.policies] == [1, 5]


def test_running_servers_are_each_policys_own_unless_policies_are_adapters() -> None:
    policies = {"writer": {"roles": ["author"]}, "reader": {"roles": ["critic"], "addresses": ["http://127.0.0.1:2"]}}
    apart = settings(policies, engine=SGLANG)
    assert [of_policy(apart, name).engine.addresses for name in policies] == [
        ("http://127.0.0.1:1",),
        ("http://127.0.0.1:2",),
    ]
    shared = settings(engine=SGLANG, **LORA)
    assert [of_policy(shared, name).engine for name in TWO] == [shared.engine] * 2
    with pytest.raises(ValueError, match=r"policies\.reader\.addresses is set, but policies share servers"):
        settings(policies, engine=SGLANG, **LORA)
