"""What can be wrong with the file of a user's own layer, told in one line that names the place in it."""

from __future__ import annotations

import pytest

from tests.cli.own_mixers import EXAMPLE, PLAIN, TINY, WHOLE

GOOD = PLAIN.format(body=WHOLE, arguments="")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("mien.py:Mine", GOOD, "there is no file {}/mien.py (did you mean '{}/mine.py'?)"),
        ("mine.py:Mien", GOOD, "mine.py has no class 'Mien' (did you mean 'Mine'?)"),
        ("mine.py", GOOD, "mine.py needs the name of a class behind it: {}/mine.py:Mine"),
        ("mine.py:torch", GOOD, "mine.py: torch is a module, not a layer"),
        ("mine.py:Mine", "class Mine:\n    pass\n", "mine.py: Mine is no layer"),
        ("mine.py:Mine", "x = (1\n", "mine.py, line 1: it cannot be loaded: SyntaxError: '(' was never closed"),
        ("mine.py:Mine", "\nx = 1 / 0\n", "mine.py, line 2: it cannot be loaded: ZeroDivisionError: division by zero"),
        ("mine.py:Mine", "import nothing_like_it\n", "mine.py, line 1: there is no module 'nothing_like_it'"),
        ("mine.py:Mine", "raise SystemExit(0)\n", "mine.py, line 1: it cannot be loaded: SystemExit: 0"),
        ("mine.py:Mine", GOOD.replace("scale=1.0", "width"),
         "Mine needs 'width', which no setting of the backbone fills"),
        ("mine.py:Mine", GOOD.replace("self.scale = scale", "self.scale = self.scal"),
         "mine.py, line 9: it could not build Mine: AttributeError: 'Mine' object has no attribute 'scal'"),
        ("mine.py:Mine", GOOD.replace(WHOLE, "return self.linear(x).mT"),
         "Mine.forward must return a tensor [B, T, D] = [4, 7, 16], got [4, 16, 7]; dimensions 1 and 2 look swapped"),
        ("mine.py:Mine", GOOD.replace(WHOLE, "return self.linear(x), None"),
         "Mine.forward must return a tensor [B, T, D] = [4, 7, 16], got tuple"),
        ("mine.py:Mine", GOOD.replace(WHOLE, "return self.linear(x[..., 1:])"),
         "mine.py, line 12: it failed in Mine.forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("mine.py:Mine", GOOD.replace("(self, x)", "(self, x, state=None, return_state=False)"),
         "Mine.forward with return_state must return (y, state), got Tensor"),
        ("mine.py:Mine", GOOD.replace("(self, x)", "(self, x, state=None, return_state=False)").replace(
            WHOLE, "return (x, {'S': x}) if return_state else self.linear(x)"),
         "the state of Mine must be a tensor, tuple, list or NamedTuple of tensors, got dict in it"),
        ("mine.py:Mine", GOOD.replace("    def __init__", "    impls = ('fast',)\n    def __init__"),
         "Mine.impls has 'fast'"),
    ],
)  # fmt: skip
def test_what_can_be_wrong_with_it(linattn, tmp_path, name, text, said):
    (tmp_path / "mine.py").write_text(text)
    code, _, err = linattn("train", "--model", tmp_path / name, *TINY, "--out", tmp_path / "run")
    assert code == 2, err
    said = said.replace("{}", str(tmp_path))
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]


def test_a_module_beside_the_file_is_not_imported(linattn, tmp_path):
    (tmp_path / "helper.py").write_text("value = 1\n")
    (tmp_path / "mine.py").write_text("import helper\n")
    code, _, err = linattn("train", "--model", tmp_path / "mine.py:Mine", *TINY)
    assert code == 2
    assert "there is no module 'helper'" in err
    assert "the file must stand alone" in err


def test_a_form_that_takes_what_nobody_can_draw(linattn, tmp_path):
    text = EXAMPLE.read_text().replace("    v: Tensor,\n    *,", "    v: Tensor,\n    temperature: Tensor,\n    *,")
    (tmp_path / "mine.py").write_text(text)
    words = ("verify-scan", "--models", tmp_path / "mine.py:Retention", "--quick", "--device", "cpu")
    code, _, err = linattn(*words)
    assert "a form that needs temperature; only q, k, v, u, beta, log_decay can be drawn" in err
    assert code == 2  # and its mix, which does not pass it, is told with its line
    assert "it failed in Retention.forward: TypeError" in err
