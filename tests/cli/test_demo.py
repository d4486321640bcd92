"""fused-mhc demo at a small size: what it writes, that it repeats itself, and what it refuses."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fused_mhc import InputError
from fused_mhc.cli import app
from fused_mhc.cli.demo import training
from fused_mhc.cli.demo.corpus import load_corpus
from fused_mhc.cli.demo.mixing import gains
from fused_mhc.cli.demo.model import MODELS, build

runner = CliRunner()
SMALL = ["--steps", "3", "--hidden", "32", "--streams", "3", "--device", "cpu"]


def run(out: Path, *more: str) -> dict[str, Any]:
    result = runner.invoke(app, ["demo", *SMALL, "--out", str(out), *more])
    assert result.exit_code == 0, result.output
    for name in MODELS:
        assert name in result.stdout
    assert str(out) in result.stdout.replace("\n", "")
    document: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return document


def figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything but the times, which no two runs share."""
    return [{k: v for k, v in model.items() if k != "step_seconds"} for model in document["models"]]


def test_report_and_repeat(tmp_path: Path) -> None:
    first = run(tmp_path / "a" / "deep")
    assert [model["name"] for model in first["models"]] == list(MODELS)
    for model in first["models"]:
        assert len(model["train_loss"]) == 3
        assert model["held_out"][-1][0] == 3
        assert model["peak_bytes"] > 4 * model["parameters"]
        assert len(model["gain_forward"]) == len(model["gain_backward"]) == 8
    page = (tmp_path / "a" / "deep" / "index.html").read_text(encoding="utf-8")
    for picture in ("loss.png", "mixing.png", "gain.png"):
        assert f'src="{picture}"' in page
        assert (tmp_path / "a" / "deep" / picture).read_bytes().startswith(b"\x89PNG")
    assert figures(run(tmp_path / "b")) == figures(first)
    assert figures(run(tmp_path / "c", "--seed", "1")) != figures(first)


def test_one_stream_and_one_step(tmp_path: Path) -> None:
    for model in run(tmp_path, "--streams", "1", "--steps", "1")["models"]:
        assert [step for step, _ in model["held_out"]] == [1]
        assert model["gain_forward"] == pytest.approx([1.0] * 8, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_models_are_causal_and_say_how_they_mix(name: str) -> None:
    model = build(name, 32, 2, 4, seed=0)
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 5:] = 7
    torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5], rtol=1e-5, atol=1e-6)
    matrices = model.mixing(tokens)
    assert matrices.shape == (4, 18, model.streams, model.streams)
    torch.testing.assert_close(matrices.sum(-2), torch.ones_like(matrices.sum(-2)), rtol=0, atol=1e-5)


def test_models_start_from_the_same_branches() -> None:
    plain, *others = (build(name, 32, 2, 4, seed=3) for name in MODELS)
    for other in others:
        for key, value in plain.branches.state_dict().items():
            assert torch.equal(value, other.branches.state_dict()[key])
        assert torch.equal(plain.embed.weight, other.embed.weight)


def test_gains_of_known_matrices() -> None:
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    triple = torch.tensor([[3.0, 0.0], [0.0, 0.5]])
    leak = torch.tensor([[1.0, 1.0], [0.0, 0.0]])  # stream 1 feeds both: columns of H (rows of H^T) sum to 1
    found = gains(torch.stack([swap, triple, leak])[:, None])
    assert found.forward == [1.0, 3.0, 3.0]
    assert found.backward == [1.0, 3.0, 6.0]


def test_peak_is_what_a_step_holds() -> None:
    model = build("plain residual", 32, 1, 1, seed=0)
    peak = training._step_peak(model, torch.zeros(1, 9, dtype=torch.int64))
    gradients = sum(p.nbytes for p in model.parameters())
    assert gradients < peak < gradients + 2**20
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "-3"], "--steps"),
        (["--streams", "0"], "--streams"),
        (["--streams", "17"], "--streams"),
        (["--hidden", "0"], "--hidden"),
        (["--hidden", "40"], "--hidden"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**63)], "--seed"),
        (["--device", "toaster"], "--device"),
    ],
)
def test_bad_options(arguments: list[str], named: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {named}: expected")
    assert arguments[1] in result.stderr
    assert not (tmp_path / "out").exists()


def test_unwritable_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "file" / "report")])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: --out: expected a folder that can be written, got")


def test_bad_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", "fastest")
    result = runner.invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: MHC_FORCE_BACKEND: expected")


def test_forced_backend_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHC_FORCE_BACKEND", "cutile")
    result = runner.invoke(app, ["demo", "--out", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 2
    assert "cutile" in result.stderr


def test_no_library_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    result = runner.invoke(app, ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: library source: expected at least 10 Python files")
    assert str(tmp_path) in result.stderr.replace("\n", "")


def test_corpus_holds_out_every_tenth_file(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_left_out.py").write_text("no")
    for index in range(20):
        (tmp_path / f"m{index:02}.py").write_text(f"#{index:02}")
    corpus = load_corpus(tmp_path)
    assert corpus.files == 20
    assert bytes(corpus.held_out.tolist()) == b"#09\n#19"
    assert bytes(corpus.train.tolist()).startswith(b"#00\n#01\n")


def test_corpus_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="library source"):
        load_corpus(tmp_path)
