import ast
import copy
import inspect
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fxsplit_encoder.config import MODES, EncoderConfig, Packing, PathConfig
from fxsplit_encoder.errors import ConfigError

# The keyword arguments, and what the message must contain beside the word "allowed": the field, what was
# got, and what would be right.
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"enabled": "yes"}, ("enabled: ", "'yes'", "boolean")),
    ({"token_budgets": True}, ("token_budgets.0: ", "True", "integer")),
    ({"token_budgets": [64, 1.5]}, ("token_budgets.1: ", "1.5", "integer")),
    ({"token_budgets": [0, 64]}, ("token_budgets: ", "[0, 64]", "0 is not positive", "at least 1")),
    ({"paths": {"a": {"token_budgets": [-1]}}}, ("paths.a.token_budgets: ", "-1 is negative", "at least 0")),
    ({"token_budgets": [64, 64]}, ("token_budgets: ", "[64, 64]", "64 is listed twice", "once")),
    ({"token_budgets": [64, 32]}, ("token_budgets: ", "[64, 32]", "32 follows 64", "increasing")),
    ({"max_items_per_batch": -1}, ("max_items_per_batch: ", "-1", "greater than or equal to 0")),
    ({"max_items_per_batch": 9, "token_budgets": [8]}, ("max_items_per_batch: ", "got 9", "0 to 8")),
    (
        {"max_items_per_batch": 9, "paths": {"local": {"token_budgets": [8]}}},
        ("max_items_per_batch: ", "paths.local.token_budgets", "got 9", "0 to 8"),
    ),
    ({"mode": "fast"}, ("mode: ", "'fast'", ", ".join(MODES))),
    ({"packing": "best"}, ("packing: ", "'best'", ", ".join(get_args(Packing)))),
    ({"splitting_ops": ["add"]}, ("splitting_ops.0: ", "'add'", "namespace::name")),
    ({"piece_compiler": "nvcc"}, ("piece_compiler: ", "'nvcc'", "inductor", "callable")),
    ({"passes": "all"}, ("passes: ", "'all'", "auto", "conv_to_linear")),
    ({"passes": ["fuse"]}, ("passes: ", "no pass is called 'fuse'", "gelu_epilogue", "pad_mlp_width")),
    ({"passes": ["gelu_epilogue"] * 2}, ("passes: ", "gelu_epilogue is listed twice", "once")),
    ({"precision": "fp8"}, ("precision: unknown option", "allowed: ", "passes")),
    ({"attention": 3}, ("attention: ", "got 3", "auto", "mapping of conditions")),
    ({"max_graph_bytes": "4 gigs"}, ("max_graph_bytes: ", "'4 gigs'", "GiB")),
    ({"max_graph_bytes": 0}, ("max_graph_bytes: ", "0", "greater than or equal to 1")),
    ({"paths": ["local"]}, ("paths: ", "['local']", "dictionary")),
    ({"paths": {"local": 64}}, ("paths.local: ", "64", "PathConfig")),
    ({"paths": {"local": {"mode": "fast"}}}, ("paths.local.mode: ", "'fast'", "piecewise")),
    ({"paths": {"local": {"mod": "full"}}}, ("paths.local.mod: ", "did you mean mode?", "token_budgets")),
    ({"token_budget": [64]}, ("token_budget: ", "did you mean token_budgets?", "max_items_per_batch")),
]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "tower.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(("values", "fragments"), BAD, ids=lambda value: str(value)[:50])
def test_bad_values_name_field_value_and_what_is_allowed(
    values: dict[str, Any], fragments: tuple[str, ...], yaml_file: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError) as raised:
        EncoderConfig(**values)
    (problem,) = raised.value.problems
    assert problem.startswith(fragments[0])
    for fragment in (*fragments, "allowed"):
        assert fragment in problem

    path = yaml_file(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as raised:
        EncoderConfig.from_yaml(path)
    assert str(raised.value) == f"{path}: {problem}"


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        EncoderConfig(enabled="yes", debug="no", paths={"a": {"mode": "fast", "x": 1}})
    starts = [problem.split(":")[0] for problem in raised.value.problems]
    assert starts == ["enabled", "paths.a.mode", "paths.a.x", "debug"]


def test_every_field_is_described() -> None:
    for model in (EncoderConfig, PathConfig):
        definition: Any = ast.parse(inspect.getsource(model)).body[0]
        statements = pairwise(definition.body)
        described = {field.target.id for field, text in statements if isinstance(text, ast.Expr)}
        assert described == model.model_fields.keys()


def test_yaml_sets_every_kind_of_field(yaml_file: Callable[[str], Path]) -> None:
    path = yaml_file(
        "enabled: false\ntoken_budgets: [8, 16]\nmax_frames_per_batch: null\nmode: none\n"
        "max_graph_bytes: 1.5 GiB\npasses: [gelu_epilogue]\n"
        "paths:\n  local: {token_budgets: [4], mode: full}\n"
    )
    expected = EncoderConfig(
        enabled=False,
        token_budgets=(8, 16),
        mode="none",
        max_graph_bytes=3 * 2**29,
        passes=("gelu_epilogue",),
        paths={"local": PathConfig(token_budgets=(4,), mode="full")},
    )
    assert EncoderConfig.from_yaml(path) == expected


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("mode: full\ntoken_budgets: [1, 2\ndebug: true\n", ("line 3, column 6", "not valid YAML")),
        ("mode: full\nmode: none\n", ("line 2, column 1", "'mode' is set twice")),
        ("3: full\n", ("3: unknown option", "allowed: enabled")),
    ],
)
def test_bad_yaml_names_file_and_place(
    text: str, fragments: tuple[str, ...], yaml_file: Callable[[str], Path]
) -> None:
    path = yaml_file(text)
    with pytest.raises(ConfigError) as raised:
        EncoderConfig.from_yaml(path)
    for fragment in (str(path), *fragments):
        assert fragment in str(raised.value)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *(("1B", 1), ("2KB", 2000), ("2KiB", 2048), ("4GiB", 2**32), (7, 7), (None, None)),
        *(("4G", 4 * 10**9), ("4gb", 4 * 10**9), (" .5 gib ", 2**29), ("2048", 2048)),
    ],
)
def test_sizes_are_bytes(size: str | int | None, expected: int | None) -> None:
    assert EncoderConfig(max_graph_bytes=size).max_graph_bytes == expected


def test_a_single_budget_needs_no_brackets(yaml_file: Callable[[str], Path]) -> None:
    path = yaml_file("token_budgets: 64\npaths: {local: {token_budgets: 0}}\n")
    config = EncoderConfig.from_yaml(path)
    assert config.token_budgets == (64,)
    assert config.paths["local"].token_budgets == (0,)


def test_options_override_their_config(yaml_file: Callable[[str], Path]) -> None:
    path = yaml_file("mode: full\ntoken_budgets: [8]\n")
    expected = EncoderConfig(mode="none", token_budgets=(8,))
    base = EncoderConfig.from_yaml(path)
    for config in (path, str(path), {"mode": "full", "token_budgets": [8]}, base):
        assert EncoderConfig.from_options({"config": config, "mode": "none"}) == expected
    assert base.mode == "full"
    assert EncoderConfig.from_options({}) == EncoderConfig()


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"token_budgts": [8]}, ("token_budgts: ", "did you mean token_budgets?", "allowed: config,")),
        ({"config": 3}, ("config: ", "path", "mapping", "got 3")),
        ({"config": {"token_budgets": [8]}, "max_items_per_batch": 9}, ("max_items_per_batch: ", "0 to 8")),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        EncoderConfig.from_options(options)
    for fragment in fragments:
        assert fragment in str(raised.value)


def test_replace_validates_the_whole() -> None:
    base = EncoderConfig(token_budgets=(8, 16), mode="full")
    assert base.replace(max_items_per_batch=8) == EncoderConfig(
        token_budgets=(8, 16), mode="full", max_items_per_batch=8
    )
    with pytest.raises(ConfigError, match="max_items_per_batch: above the smallest budget"):
        base.replace(max_items_per_batch=9)
    with pytest.raises(ConfigError, match="did you mean mode"):
        base.replace(mod="full")


def test_piece_compiler_may_be_a_callable() -> None:
    def compiler(graph: object, inputs: object) -> object:
        return graph

    assert EncoderConfig(piece_compiler=compiler).piece_compiler is compiler


def test_equal_configurations_hash_alike() -> None:
    first = EncoderConfig(paths={"a": {"mode": "full"}, "b": {"mode": "none"}})
    second = EncoderConfig(paths={"b": {"mode": "none"}, "a": {"mode": "full"}})
    assert first == second
    assert hash(first) == hash(second)
    assert first != EncoderConfig()


def test_configurations_are_frozen_and_copy() -> None:
    config = EncoderConfig(token_budgets=(8,), paths={"a": {"mode": "full"}})
    with pytest.raises(ValueError, match="frozen"):
        config.mode = "none"  # type: ignore[misc]
    for clone in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert clone == config
        assert clone.replace(mode="none") == config.replace(mode="none")


def test_repr_shows_what_differs_from_the_defaults() -> None:
    assert repr(EncoderConfig(mode="auto")) == "EncoderConfig()"
    config = EncoderConfig(mode="full", token_budgets=[8])
    assert repr(config) == str(config) == "EncoderConfig(token_budgets=(8,), mode='full')"


@given(st.lists(st.integers(-3, 40), max_size=6))
def test_budgets_are_accepted_if_and_only_if_strictly_increasing_and_positive(budgets: list[int]) -> None:
    right = all(budget > 0 for budget in budgets) and budgets == sorted(set(budgets))
    try:
        accepted = EncoderConfig(token_budgets=budgets).token_budgets == tuple(budgets)
    except ConfigError:
        accepted = False
    assert accepted == right


def test_a_stream_has_one_of_cudas_priorities() -> None:
    assert EncoderConfig().stream_priority == 0
    assert EncoderConfig(stream_priority=-3).stream_priority == -3
    for priority in (1, -4, "high", 0.5):
        with pytest.raises(ConfigError, match="stream_priority"):
            EncoderConfig(stream_priority=priority)
