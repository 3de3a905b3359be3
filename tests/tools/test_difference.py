"""The command ``difference``: shares of equal bits of two runs, in files and in folders of models."""

import json
import sys

import pytest
import torch

import fusednorm
from fusednorm.tools.agree import difference
from fusednorm.tools.agree.difference import Share, in_all_layers, shares, shares_of_models
from fusednorm.tools.cli import UnusableError

safetensors = pytest.importorskip("safetensors.torch", reason="files need safetensors")

A = {
    "layers.0.norm": torch.tensor([1.0, float("nan"), 0.0, 3.0]),
    "layers.1.norm": torch.ones(4),
    "head": torch.arange(4),
    "numbers": torch.tensor([0, 127], dtype=torch.uint8).view(torch.float8_e4m3fn),
    "left": torch.ones(2),
    "other": torch.ones(2),
}
B = {
    "layers.0.norm": torch.tensor([1.0, float("nan"), -0.0, 3.0000002]),
    "layers.1.norm": torch.ones(4),
    "head": torch.arange(4),
    "numbers": torch.tensor([128, 127], dtype=torch.uint8).view(torch.float8_e4m3fn),
    "other": torch.ones(2, dtype=torch.bfloat16),
    "right": torch.ones(2),
}
FOUND = [
    Share("layers.0.norm", 4, 3),
    Share("layers.1.norm", 4, 4),
    Share("head", 4, 4),
    Share("numbers", 2, 1),
    Share("left", reason="only in A"),
    Share("other", reason="A has float32 [2], B has bfloat16 [2]"),
    Share("right", reason="only in B"),
]


def saved(folder, **runs):
    for name, tensors in runs.items():
        safetensors.save_file(tensors, folder / name)
    return [folder / name for name in runs]


def test_shares():
    """NaN equals NaN, and +0 equals -0, but not in 8 bits; what cannot be compared says why."""
    assert shares(A, B) == FOUND


class Adds(torch.nn.Module):
    """A step that writes to its argument."""

    def forward(self, x):
        return x.add_(1).clone()


class OneStep(torch.nn.Module):
    """A model of that step."""

    def __init__(self):
        super().__init__()
        self.step = Adds()

    def forward(self, x, use_cache):
        return self.step(x.clone())


def test_a_step_is_given_its_arguments_as_they_were():
    assert shares_of_models(OneStep(), OneStep(), {"x": torch.ones(3)}) == [Share("step", 3, 3, 3)]


def test_layers_are_added_up():
    """Also the shares from equal inputs; a step that could not be compared keeps its own line."""
    assert in_all_layers(FOUND) == [Share("layers.*.norm", 8, 7), *FOUND[2:]]
    alone = [
        Share("layers.0.norm", 4, 3, 4),
        Share("layers.1.norm", 4, 4, 2),
        Share("layers.2.norm", reason="only in A"),
    ]
    assert in_all_layers(alone) == [Share("layers.*.norm", 8, 7, 6), alone[2]]
    assert in_all_layers([Share("q4.norm", 1, 1)]) == [Share("q4.norm", 1, 1)]


def test_files(called, capsys, tmp_path):
    files = saved(tmp_path, a=A, b=B)
    assert called("difference", *files, "--json", tmp_path / "json") == 1
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines() if "layers" in line] == [["layers.*.norm", "8", "87.50%"]]
    assert "A has float32 [2], B has bfloat16 [2]" in shown
    assert "100%" in shown
    assert "inputs" not in shown
    assert {Share(**share) for share in json.loads((tmp_path / "json").read_text())} == set(FOUND)
    called("difference", *files, "--all")
    assert "layers.1.norm" in capsys.readouterr().out


def test_status(called, tmp_path):
    """0 only where all bits are equal, and all steps are in both."""
    same = {"x": torch.ones(3)}
    a, b, c = saved(tmp_path, a=same, b=same, c={**same, "y": torch.ones(1)})
    assert called("difference", a, b) == 0
    assert called("difference", a, c) == 1


def test_all_equal_means_all(called, capsys, tmp_path):
    """99.999% is not shown as 100%."""
    many = torch.zeros(100_000)
    assert called("difference", *saved(tmp_path, a={"x": many}, b={"x": many.index_fill(0, torch.tensor(7), 1.0)}))
    assert "99.99%" in capsys.readouterr().out


class Model(torch.nn.Module):
    """Two layers and a head, the second layer after an in-place change of the first one's result."""

    def __init__(self, *norms):
        super().__init__()
        self.norms = torch.nn.ModuleList(norms)
        self.add = fusednorm.AddRMSNorm(8, 1e-5)

    def forward(self, x, use_cache):
        h = self.norms[0](x)
        y = self.norms[1](h.add_(1.0))
        return self.add(y, residual=h)


def test_models():
    """The whole run, and each step from the first model's inputs: only the step that rounds otherwise differs there."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = [fusednorm.RMSNorm(8, 1e-5), fusednorm.RMSNorm(8, 1e-5)]
    other = fusednorm.RMSNorm(8, 1e-5, weight_offset=0.5)
    other.weight.data.fill_(1.0)
    a, b, same = Model(*plain), Model(plain[0], other), Model(*plain)
    assert [(s.name, s.equal, s.alone) for s in shares_of_models(a, same, {"x": x})] == [
        ("norms.0", 128, 128),
        ("norms.1", 128, 128),
        ("add[0]", 128, 128),
        ("add[1]", 128, 128),
    ]
    first, second, *added = shares_of_models(a, b, {"x": x})
    assert (first.equal, first.alone) == (128, 128)
    assert second.equal == second.alone < 128
    assert all(share.equal < share.alone == 128 for share in added)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in [*a.modules(), *b.modules()])


def test_folders(called, capsys, tmp_path):
    """A Llama beside itself, patched: the norms differ by rounding places of the sum of squares at most."""
    transformers = pytest.importorskip("transformers", reason="folders of models need transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=8, num_hidden_layers=2, dtype="bfloat16", **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    capsys.readouterr()
    prompt = ["--prompt", "one two three two"]
    assert called("difference", tmp_path, tmp_path, *prompt) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines() if "input_layernorm" in line] == [
        ["model.layers.*.input_layernorm", "256", "100%", "100%"]
    ]
    assert called("difference", tmp_path, tmp_path, *prompt, "--patch", "both") == 0
    assert capsys.readouterr().out.count("5 norms replaced") == 2
    called("difference", tmp_path, tmp_path, *prompt, "--patch", "B", "--all")
    assert "B: LlamaRMSNorm" in capsys.readouterr().out
    assert called("difference", tmp_path, tmp_path) == 2
    assert "folders of models need --prompt TEXT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "none"], "none does not exist"),
        (["a", "."], "A and B must be two files or two folders"),
        (["a", "a", "--prompt", "x"], "--prompt and --patch are for folders of models"),
        (["a", "a", "--patch", "B"], "--prompt and --patch are for folders of models"),
        (["a", "text"], "text is no safetensors file that can be read: "),
        (["empty", "empty"], "there is nothing to compare"),
        ([".", ".", "--prompt", "x"], "holds no causal model that can be loaded"),
    ],
)
def test_refusals(called, monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, a=A, empty={})
    (tmp_path / "text").write_text("no tensors")
    if "." in arguments and "--prompt" in arguments:
        pytest.importorskip("transformers", reason="folders of models need transformers")
    assert called("difference", *arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("package", "extra"), [("safetensors", "difference"), ("transformers", "transformers")])
def test_the_missing_package_is_named(monkeypatch, tmp_path, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnusableError, match=rf"need {package} .*pip install 'fusednorm\[{extra}\]'"):
        difference.read(tmp_path / "x") if package == "safetensors" else difference.load(tmp_path, "x")
