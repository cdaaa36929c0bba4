"""Whatever a recipe or `--set` holds: a configuration that survives a round trip, or one clear line and exit code 2."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from linattn_cli.config import dump_recipe, load_run_config
from linattn_cli.kernels.registry import MIXERS
from linattn_cli.output import describe_error
from linattn_cli.recipe import read_recipe, recipe_names
from linattn_cli.settings import CopyConfig, ModelConfig, MqarConfig, RunConfig, SweepConfig, TrainConfig
from tests.fuzz import examples

KEYS = sorted(
    {
        name
        for section in (ModelConfig, MqarConfig, CopyConfig, TrainConfig, SweepConfig, RunConfig)
        for name in section.model_fields
    }
    | {option for mixer in MIXERS.values() for option in mixer.options}
)
WORDS = [*MIXERS, "mqar", "copy", "learned", "rotary", "none", "float32", "bfloat16", "auto", "cpu", "cuda:0", "triton"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**40, -(10**40)]),
    st.floats(),
    st.sampled_from([0.1, 1e-3, 1.0, -0.0]),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def recipes(draw):
    """Recipes that are mostly right, so that what is behind the first check is reached as well."""
    data = {}
    if draw(st.booleans()):
        name = draw(st.sampled_from(list(MIXERS)))
        options = {key: draw(_value_of(option)) for key, option in MIXERS[name].options.items() if draw(st.booleans())}
        data["model"] = {"name": name, "options": options, **draw(_some(ModelConfig, skip=("name", "options")))}
    if draw(st.booleans()):
        task = draw(st.sampled_from([MqarConfig, CopyConfig]))
        data["task"] = {"name": "mqar" if task is MqarConfig else "copy", **draw(_some(task, skip=("name",)))}
    if draw(st.booleans()):
        data["train"] = draw(_some(TrainConfig))
    if draw(st.integers(0, 3)) == 0:
        data["sweep"] = draw(_some(SweepConfig))
    if draw(st.integers(0, 4)) == 0:
        data[draw(st.sampled_from(KEYS))] = draw(values)
    return data


def _value_of(option):
    """A value for a mixer's option: a right one three times in four."""
    right = st.sampled_from(option.choices) if option.choices else st.just(option.default)
    return st.one_of(right, right, right, scalars)


@st.composite
def _some(draw, section, skip=()):
    data = {}
    for name, field in section.model_fields.items():
        if name in skip or draw(st.integers(0, 4)):
            continue
        default = field.get_default(call_default_factory=True)
        data[name] = draw(st.one_of(st.just(default), st.just(default), st.integers(1, 40), values))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def loads(path, **how):
    """A configuration, or None after a refusal that is as it should be."""
    try:
        config = load_run_config(str(path) if path is not None else None, **how)
    except Exception as error:
        raised, found = error, describe_error(error)
    else:
        return config
    assert found.exit_code == 2, repr(raised)
    assert found.message
    assert found.message.isprintable(), found.message
    return None


def survives(config, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "again.yaml"
    path.write_text(dump_recipe(config), encoding="utf-8")
    assert load_run_config(str(path)) == config


@examples(400)
@given(recipe=recipes())
def test_any_data(recipe, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(yaml.safe_dump(recipe, allow_unicode=True).encode(errors="surrogatepass"))
    if (config := loads(path)) is not None:
        survives(config, tmp_path_factory)


@st.composite
def mutated(draw):
    """The text of one of our recipes after a few slips of an editor."""
    from importlib import resources

    name = draw(st.sampled_from(recipe_names()))
    lines = (resources.files("linattn_cli.recipes") / f"{name}.yaml").read_text().splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["drop", "double", "swap", "indent", "cut", "insert"])):
            case "drop":
                lines[at] = ""
            case "double":
                lines.insert(at, lines[at])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[at], lines[other] = lines[other], lines[at]
            case "indent":
                lines[at] = draw(st.sampled_from([" ", "\t", "   "])) + lines[at]
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, max(0, len(lines[at]) - 1)))]
            case "insert":
                where = draw(st.integers(0, len(lines[at])))
                what = draw(st.sampled_from([*"[]{}:&*!|>'\"#%@`,?-~<\x00\x07\ud800"]) | st.text(max_size=3))
                lines[at] = lines[at][:where] + what + lines[at][where:]
    return "".join(lines)


@examples(150)
@given(text=mutated() | st.text())
def test_any_text(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "text.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    if (config := loads(path)) is not None:
        survives(config, tmp_path_factory)


@examples(100)
@given(data=st.binary(max_size=60))
def test_any_bytes(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(data)
    loads(path)


keys = st.lists(st.sampled_from([*KEYS, "model", "task", "train", "sweep"]), min_size=1, max_size=3).map(".".join)
settings_ = st.builds(
    "{}={}".format, keys | st.text(max_size=6), st.one_of(scalars.map(str), st.text(max_size=12), values.map(repr))
)


@examples(300)
@given(sets=st.lists(settings_ | st.text(max_size=10), max_size=3))
def test_any_set(sets, tmp_path_factory):
    if (config := loads(None, sets=sets)) is not None:
        survives(config, tmp_path_factory)


def test_the_recipes_that_are_drawn_are_often_right(tmp_path_factory):
    """Else nothing behind the first check would be tried."""
    right = []

    @examples(100)
    @given(recipe=recipes())
    def draw(recipe):
        path = tmp_path_factory.getbasetemp() / "right.yaml"
        path.write_bytes(yaml.safe_dump(recipe, allow_unicode=True).encode(errors="surrogatepass"))
        right.append(loads(path) is not None)

    draw()
    assert 0.15 < sum(right) / len(right) < 0.95
    assert read_recipe("demo").data
