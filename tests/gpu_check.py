"""What only a GPU can show, in one run of less than eight minutes: `make gpu-check`.

CUDA against CPU, compiled or not, in every precision; a resume over the update of unsharing; repeats bit for bit; no
compilation and no wait for the device once training runs; and the bench against Transformers. Writes `gpu-check.json`
and `profile.json` (open it at chrome://tracing or ui.perfetto.dev). Without CUDA, or with ``--device cpu``, it is a dry
run of the same code at tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conftest import invented_text
from safetensors.torch import load_file

from sharebert.cli import main
from sharebert.metrics import read_metrics
from sharebert.trainer import Trainer
from sharebert.update import Updater

TINY = {
    "data": "text_files",
    "data.vocab_size": 200,
    "data.seq_len": 32,
    "data.num_proc": 1,
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.intermediate_size": 128,
    "model.max_position_embeddings": 512,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "global_batch_size": 16,
    "engine.micro_batch_size": 8,
    "max_steps": 30,
    "unshare.step": 15,
    "optim.warmup_steps": 5,
    "checkpoint.every_steps": "null",
    "evaluation.every_steps": 10,
    "evaluation.max_sequences": 32,
    "logging.every_steps": 10,
}
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
"""How far the last loss may lie from that of fp32 on a CPU."""


class GpuCheck:
    """Runs and remembers the checks; `folder` holds the runs, `output` what stays."""

    def __init__(self, device: str, folder: Path, output: Path, seconds: float) -> None:
        self.device, self.folder, self.output, self.seconds = device, folder, output, seconds
        self.is_dry = device == "cpu"
        text = folder / "stories.txt"
        text.write_text(invented_text(300), encoding="utf-8")
        self.settings = {**TINY, "data.files": f"[{text}]", "data.cache_dir": folder / "cache", "output_dir": folder}

    def train(self, name: str, **changes: object) -> Path:
        """Run `sharebert train` in this process (`__` in a key stands for a dot); the run folder."""
        values = {**self.settings, "engine.device": self.device, "run_name": name}
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        status = main(["train", *(f"{key}={value}" for key, value in values.items())])
        assert status == 0, f"run {name} ended with status {status}"
        return self.folder / name

    # ------------------------------------------------------------------ the checks

    def check_precisions(self) -> dict[str, Any]:
        """Every precision, compiled and not, ends near fp32 on a CPU."""
        expected = last_loss(self.train("cpu", engine__device="cpu", engine__precision="fp32", engine__compile="false"))
        losses = {"cpu fp32": expected}
        for precision in ("fp32", "bf16", "fp16"):
            for compile_ in ("false", "true"):
                if self.is_dry and (precision, compile_) in (("fp32", "true"), ("fp16", "true")):
                    continue  # a minute of compiling each, on a CPU
                name = f"{precision}-compile-{compile_}"
                loss = last_loss(self.train(name, engine__precision=precision, engine__compile=compile_))
                losses[name] = loss
                assert abs(loss - expected) < LOSS_TOLERANCE[precision], f"{name}: {loss}, expected near {expected}"
        return losses

    def check_repeat(self) -> dict[str, Any]:
        """`debug=deterministic`: the same run again, and one resumed before unsharing, end in the same bits."""
        changes = {"debug": "deterministic", "engine__precision": "bf16", "engine__compile": "false"}
        first = self.train("first", **changes)
        again = self.train("again", **changes)
        start = first / "checkpoints" / "step-00000014-shared"
        resumed = self.train("resumed", checkpoint__resume=start, **changes)
        for run in (again, resumed):
            differing = different_tensors(first, run)
            assert not differing, f"{run.name}: other bits in {differing[0]} and {len(differing) - 1} more"
        return {"tensors": len(final_tensors(first)), "resumed_from": start.name}

    def check_compilations(self) -> dict[str, Any]:
        """After the first update and evaluation nothing is compiled: through checks, splits, evaluations, resumes."""
        torch.compiler.reset()
        graphs: list[int] = []
        with after_each_update(lambda _: graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])):
            self.train(
                "compiled",
                engine__compile="true",
                unshare="multi_step",
                unshare__step="null",
                unshare__check_every=2,
                unshare__threshold=0.99,
                unshare__patience=1,
                evaluation__every_steps=5,
            )
        # Step 0 evaluates, update 1 trains, update 2 is the first check; none of them may come later again.
        assert graphs[0] > 0, "nothing was compiled"
        assert len(set(graphs)) == 1, f"graphs after each update: {graphs}"
        return {"graphs": graphs[-1], "updates": len(graphs)}

    def check_waits(self) -> dict[str, Any]:
        """No update waits for the device: torch would raise."""
        if self.is_dry:
            return {"skipped": "torch reports waits on CUDA only; on a CPU tests/test_trainer.py counts reads"}
        original = Updater.run

        def run(updater: Updater, window: Any, **flags: bool) -> Any:
            is_warm = updater.state.counters.step > 2
            torch.cuda.set_sync_debug_mode("error" if is_warm and not flags["measures_ratio"] else "default")
            try:
                return original(updater, window, **flags)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        with mock.patch.object(Updater, "run", run):
            self.train("waits", engine__precision="bf16")
        return {}

    def check_bench(self) -> dict[str, Any]:
        """BERT-base and BERT-Large at length 128 and 512 against Transformers."""
        found = {}
        models = ("bert_tiny",) if self.is_dry else ("bert_base", "bert_large")
        for model in models:
            for seq_len, sequences in ((128, 2), (512, 1)) if self.is_dry else ((128, 128), (512, 32)):
                settings = [f"model={model}", f"data.seq_len={seq_len}", "data.vocab_size=30522"]
                flags = ["--json", "--seconds", str(self.seconds), "--sequences", str(sequences)]
                batch = [f"global_batch_size={sequences}", f"engine.device={self.device}"]
                shown = io.StringIO()
                with contextlib.redirect_stdout(shown):
                    assert main(["bench", *settings, *batch, *flags]) == 0
                found[f"{model}-{seq_len}"] = json.loads(shown.getvalue())
        return found

    def check_profile(self) -> dict[str, Any]:
        """A profile of two shared and two unshared updates."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not self.is_dry:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        plan = torch.profiler.schedule(wait=0, warmup=3, active=4)  # updates 4 to 7; 6 is the first unshared one
        profiled = torch.profiler.profile(activities=activities, schedule=plan, acc_events=True)
        with profiled as profiler, after_each_update(lambda _: profiler.step()):
            self.train("profiled", max_steps=8, unshare__step=6, engine__precision="bf16")
        profiler.export_chrome_trace(str(self.output / "profile.json"))
        return {"file": "profile.json", "slowest": [event.key for event in profiler.key_averages()[:5]]}


def last_loss(run: Path) -> float:
    """Held-out loss at the end."""
    return float([row["eval/loss"] for row in read_metrics(run / "metrics.jsonl") if "eval/loss" in row][-1])


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    """The weights at the end."""
    tensors: dict[str, torch.Tensor] = load_file(run / "checkpoints" / "latest" / "model.safetensors")
    return tensors


def different_tensors(first: Path, second: Path) -> list[str]:
    """Names of the final weights that are not equal bit for bit."""
    ours, theirs = final_tensors(first), final_tensors(second)
    return [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name], theirs[name])]


@contextlib.contextmanager
def after_each_update(act: Callable[[Trainer], object]) -> Iterator[None]:
    """Call `act` after every update and what follows it."""
    original = Trainer._cross_boundary

    def cross(trainer: Trainer) -> bool:
        goes_on = original(trainer)
        act(trainer)
        return goes_on

    with mock.patch.object(Trainer, "_cross_boundary", cross):
        yield


def run_checks(check: GpuCheck) -> dict[str, Any]:
    """Run all; one that fails does not keep the others from running."""
    results: dict[str, Any] = {}
    for name in [name for name in dir(check) if name.startswith("check_")]:
        begin = time.perf_counter()
        try:
            results[name] = {"ok": True, **getattr(check, name)()}
        except Exception as error:
            traceback.print_exc()
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.perf_counter() - begin, 1)
        outcome = "ok" if results[name]["ok"] else results[name]["error"]
        print(f"{name}: {outcome} ({results[name]['seconds']} s)", file=sys.stderr)
    return results


def run() -> int:
    """The program; 0 when every check is well."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu-check"))
    parser.add_argument("--seconds", type=float, default=None, help="of measuring, for each bench")
    arguments = parser.parse_args()
    warnings.simplefilter("default")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for check_repeat; read once, at the first product
    arguments.output.mkdir(parents=True, exist_ok=True)
    seconds = arguments.seconds or (0.5 if arguments.device == "cpu" else 15.0)
    folder = Path(tempfile.mkdtemp())
    try:
        results = run_checks(GpuCheck(arguments.device, folder, arguments.output, seconds))
    finally:
        shutil.rmtree(folder)
    is_cuda = arguments.device == "cuda"
    name = torch.cuda.get_device_name() if is_cuda else "cpu (dry run)"
    report = {"device": name, "torch": torch.__version__, "checks": results}
    (arguments.output / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    is_well = all(result["ok"] for result in results.values())
    print(json.dumps({"device": name, "ok": is_well, "report": str(arguments.output / "gpu-check.json")}))
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(run())
