"""Models of transformers in every mode: training, generate(), checkpoints, saving."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from gradscale.torch import MixedPrecision, checkpoint
from gradscale.torch.mixed_precision import MODES
from pretrained_models import (
    GENERATES,
    HALF_MODES,
    MODELS,
    batch,
    losses,
    model,
    precision,
    run,
    tolerance,
    transformers,
)
from tensors import same

QUICK = [("gpt2", mode) for mode in HALF_MODES]
QUICK += [(name, "fp16-master") for name in MODELS if name != "gpt2"]
SOAK = [(name, mode) for name in MODELS for mode in HALF_MODES if (name, mode) not in QUICK]
RUNS = [*QUICK, *(pytest.param(*each, marks=pytest.mark.soak) for each in SOAK)]
every_run = pytest.mark.parametrize(("name", "mode"), RUNS)
every_generating_run = pytest.mark.parametrize(
    ("name", "mode"), [each for each in RUNS if getattr(each, "values", each)[0] in GENERATES]
)
every_model = pytest.mark.parametrize("name", MODELS)
every_mode = pytest.mark.parametrize("mode", HALF_MODES)
MASTERS = [name for name, mode in MODES.items() if mode.casts]


def is_close(found: Tensor, wanted: Tensor, atol: float) -> bool:
    return bool((found - wanted).abs().max() <= atol)


# Training.


@every_run
def test_losses_are_those_of_float32(name: str, mode: str) -> None:
    found = run(name, mode)
    assert found[-1] < 0.7 * found[0]
    assert is_close(found, run(name, "fp32"), tolerance(name, mode))


@every_model
def test_the_comparison_of_losses_sees_a_wrong_learning_rate(name: str) -> None:
    wrong = run(name, "fp32", lr=3.3e-3)
    assert not is_close(wrong, run(name, "fp32"), tolerance(name, "fp16-master"))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "mode"), [*QUICK[: len(HALF_MODES)], ("llama", "fp16-master")])
def test_losses_are_those_of_float32_on_a_gpu(name: str, mode: str) -> None:
    found = run(name, mode, "cuda")
    assert found[-1] < 0.7 * found[0]
    assert is_close(found, run(name, "fp32", "cuda"), tolerance(name, mode, "cuda"))


@every_run
def test_a_run_goes_on_bit_for_bit(name: str, mode: str) -> None:
    net = model(name, dropout=0.1)
    mp = precision(net, mode)
    list(losses(net, mp, batch(name), 4))
    file = io.BytesIO()
    torch.save({"mp": mp.state_dict(), "random": checkpoint.random_state()}, file)
    wanted = list(losses(net, mp, batch(name), 4))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    with torch.no_grad():
        other = MODELS[name](0.1).train()
        for param in other.parameters():
            param.zero_()
    again = precision(other, mode)
    again.load_state_dict(saved["mp"])
    checkpoint.set_random_state(saved["random"])
    assert list(losses(other, again, batch(name), 4)) == wanted
    assert same(mp.float32_model_state(), again.float32_model_state())
    torch.manual_seed(0)  # other numbers for dropout, other losses: the comparison sees them
    assert list(losses(other, again, batch(name), 1)) != list(losses(net, mp, batch(name), 1))


@every_generating_run
def test_generate_after_training(name: str, mode: str) -> None:
    net, inputs = model(name), batch(name)
    mp = precision(net, mode)
    list(losses(net, mp, inputs, 2))
    del inputs["labels"]
    net.eval()
    texts = {}
    for kind in ("dynamic", "static"):
        settings: dict[str, Any] = {} if kind == "dynamic" else {"cache_implementation": "static"}
        texts[kind] = net.generate(
            **inputs, max_new_tokens=5, do_sample=False, disable_compile=True, **settings
        )
    assert torch.equal(texts["dynamic"], texts["static"])
    sampled = net.generate(
        **inputs, max_new_tokens=3, num_beams=2, output_scores=True, return_dict_in_generate=True
    )
    assert sampled.scores[0].isfinite().any()
    net.train()
    list(losses(net, mp, batch(name), 1))


@pytest.mark.parametrize("mode", ["fp16", *MASTERS])
def test_a_cache_goes_out_and_comes_in(mode: str) -> None:
    net, tokens = model("llama").eval(), batch("llama")["input_ids"]
    mp = precision(net, mode)
    with torch.no_grad(), mp.autocast():
        whole = net(tokens).logits
        cache = transformers.DynamicCache(config=net.config)
        start = net(tokens[:, :6], past_key_values=cache, use_cache=True)
        assert start.past_key_values is cache
        end = net(tokens[:, 6:], past_key_values=cache, position_ids=torch.arange(6, 12)[None])
    got = torch.cat([start.logits, end.logits], dim=1).float()
    torch.testing.assert_close(got, whole.float(), rtol=0, atol=2.0**-6)
    if mode in MASTERS:
        assert start.logits.dtype is torch.float32
        assert cache.layers[0].keys.dtype is MODES[mode].dtype


@every_model
def test_without_return_dict(name: str) -> None:
    runs = []
    for settings in ({}, {"return_dict": False}, {"output_hidden_states": True}):
        net = model(name)
        mp = precision(net, "fp16-master")
        output = net(**batch(name), **settings)
        assert isinstance(output, tuple) == ("return_dict" in settings)
        assert output[0].dtype is output[1].dtype is torch.float32
        mp.backward(output[0])
        mp.step()
        runs.append(list(net.parameters()))
    assert type(output) is type(MODELS[name](0.0)(**batch(name)))
    assert list(output) == list(output.keys())
    assert output["logits"] is output.logits
    hidden = output.get("hidden_states") or output["decoder_hidden_states"]
    assert {each.dtype for each in hidden} == {torch.float32}
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.parametrize(
    ("name", "reentrant"),
    # T5 adds the gradients of its position bias in another order then, in float32 as well.
    [(name, how) for name in MODELS for how in (True, False) if (name, how) != ("t5", True)],
)
def test_checkpointed_gradients_are_the_same(name: str, reentrant: bool) -> None:
    runs = []
    for checkpointed in (False, True):
        net = model(name, dropout=0.1)
        if checkpointed:
            net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        net.config.use_cache = False
        list(losses(net, precision(net, "fp16-master"), batch(name), 2))
        runs.append(list(net.parameters()))
    assert same(*runs)


@pytest.mark.parametrize(
    ("name", "mode"), [("gpt2", "fp16-pure"), ("bert", "bf16-master"), ("t5", "fp16-master")]
)
def test_tied_embeddings_stay_one(name: str, mode: str) -> None:
    net = model(name)
    mp = precision(net, mode)
    list(losses(net, mp, batch(name), 2))
    assert net.get_output_embeddings().weight is net.get_input_embeddings().weight
    assert net.dtype is MODES[mode].dtype
    with mp.float32_weights():
        assert net.get_output_embeddings().weight is net.get_input_embeddings().weight


def test_optimizers_before_and_after_the_cast_are_the_same() -> None:
    before, after = model("llama"), model("llama")
    optimizer = optim.AdamW(before.parameters(), lr=3e-3)
    first = MixedPrecision(before, optimizer, "fp16-master")
    second = precision(after, "fp16-master", lr=3e-3)  # ours
    second.optimizers[0].param_groups[0]["weight_decay"] = optimizer.defaults["weight_decay"]
    list(losses(before, first, batch("llama"), 3))
    list(losses(after, second, batch("llama"), 3))
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-10, atol=2.0**-14)


# Numbers that float16 does not have.


@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "bf16-master"])
def test_a_mask_that_hides_whole_rows_makes_no_nan(mode: str) -> None:
    tokens = batch("llama")["input_ids"]
    lowest = torch.finfo(torch.float32).min
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    mask = torch.zeros(4, 1, 12, 12).masked_fill(later, lowest)
    mask[0, :, 3] = lowest
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    for attention in ("sdpa", "eager"):
        net = model("llama")
        net.set_attn_implementation(attention)
        mp = precision(net, mode)
        for each in (mask, padded, padded.float()):
            with mp.autocast():
                loss = net(tokens, attention_mask=each, labels=tokens).loss
            mp.backward(loss)
            assert mp.step().applied


@every_mode
def test_t5_keeps_what_it_wants_in_float32(mode: str) -> None:
    net = model("t5")
    wanted = "float16" in MODES[mode].passes and "bfloat16" not in MODES[mode].passes
    precision(net, mode)
    seen: list[torch.dtype] = []
    for name, module in net.named_modules():
        if name.endswith(".wo"):
            module.register_forward_hook(lambda *args: seen.append(args[2].dtype))
            assert module.weight.dtype is (
                torch.float32 if wanted or mode not in MASTERS else MODES[mode].dtype
            )
        assert (
            not name.endswith(".wi")
            or mode not in MASTERS
            or (module.weight.dtype is MODES[mode].dtype)
        )
    with torch.autocast("cpu", MODES[mode].dtype):
        net(**batch("t5"))
    assert set(seen) == {torch.float32 if wanted else MODES[mode].dtype}


def test_names_of_what_stays_in_float32_are_whole_names() -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wo, self.wort, self.gate = (nn.Linear(2, 2) for _ in range(3))
            self.shift = nn.Parameter(torch.zeros(2))
            self._keep_in_fp32_modules = ["wo"]
            self._keep_in_fp32_modules_strict = {"gate.weight", "shif*"}

        def forward(self, x: Tensor) -> Tensor:
            return self.gate(self.wort(self.wo(x))) + self.shift

    for mode in ("fp16-master", "bf16-master"):
        part = Part()
        whole = nn.Sequential(part)
        precision(whole, mode)
        whole(torch.ones(1, 2)).sum().backward()
        half = MODES[mode].dtype
        assert part.wo.weight.dtype is (torch.float32 if mode == "fp16-master" else half)
        assert part.wort.weight.dtype is part.gate.bias.dtype is half
        assert part.gate.weight.dtype is part.shift.dtype is torch.float32


def test_buffers_of_rotary_embeddings_stay_in_float32() -> None:
    net = model("llama")
    frequencies = net.model.rotary_emb.inv_freq.clone()
    precision(net, "fp16-master")
    assert same(net.model.rotary_emb.inv_freq, frequencies)


def test_models_within_are_called_by_themselves() -> None:
    for name, part in (("t5", "encoder"), ("bert", "bert"), ("llama", "model")):
        net = model(name)
        precision(net, "fp16-master")
        inner = getattr(net, part)
        with torch.no_grad():
            output = inner(batch(name)["input_ids"])
            wanted = copy.deepcopy(inner).float()(batch(name)["input_ids"])
        torch.testing.assert_close(output[0].float(), wanted[0].float(), rtol=0.02, atol=0.02)


def test_models_within_a_kept_module_run_in_float32() -> None:
    whole = nn.ModuleDict({"kept": model("t5"), "cast": model("t5")})
    precision(whole, "fp16-master", keep_float32=["kept"])
    seen: dict[str, torch.dtype] = {}
    for name, net in whole.items():
        block = net.encoder.block[0].layer[0].SelfAttention.q
        block.register_forward_hook(lambda *args, name=name: seen.update({name: args[2].dtype}))
        net(**batch("t5"))
    assert seen == {"kept": torch.float32, "cast": torch.float16}
    assert {each.dtype for each in whole["kept"].parameters()} == {torch.float32}


@pytest.mark.soak
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_compiled_model_is_the_same(name: str) -> None:
    nets = [model(name), model(name)]
    both = [precision(net, "fp16-master") for net in nets]
    calls = [nets[0], torch.compile(nets[1], backend="eager", fullgraph=True)]
    found = [list(losses(call, mp, batch(name), 3)) for call, mp in zip(calls, both, strict=True)]
    assert found[0] == found[1]


# Saving and loading.


@pytest.mark.parametrize(
    ("name", "mode"),
    [("gpt2", "fp16"), ("gpt2", "fp16-master"), ("gpt2", "fp16-pure"), ("t5", "bf16-master")],
)
def test_save_pretrained(name: str, mode: str, tmp_path: Any) -> None:
    net = model(name)
    mp = precision(net, mode)
    list(losses(net, mp, batch(name), 2))
    params, state = list(net.parameters()), copy.deepcopy(net.state_dict())
    with mp.float32_weights():
        net.save_pretrained(tmp_path / "float32")
    assert all(map(lambda one, other: one is other, net.parameters(), params))
    assert same(dict(net.state_dict()), dict(state))
    wanted = mp.float32_model_state()
    loaded = type(net).from_pretrained(tmp_path / "float32")
    assert loaded.dtype is torch.float32
    assert same(dict(loaded.state_dict()), wanted)
    net.save_pretrained(tmp_path / "given", state_dict=mp.float32_model_state())
    loaded = type(net).from_pretrained(tmp_path / "given", dtype=torch.float32)
    assert same(dict(loaded.state_dict()), wanted)
    net.save_pretrained(tmp_path / "own")  # in the model's own format
    loaded = type(net).from_pretrained(tmp_path / "own")
    assert loaded.dtype is net.dtype
    for key, value in loaded.state_dict().items():
        assert same(value, state[key].to(value.dtype))
    list(losses(net, mp, batch(name), 1))


def test_float32_weights_come_back_after_an_error() -> None:
    net = model("gpt2")
    mp = precision(net, "fp16-master")
    params = list(net.parameters())

    def fail() -> None:
        with mp.float32_weights():
            assert {each.dtype for each in net.parameters()} == {torch.float32}
            raise MemoryError

    with pytest.raises(MemoryError):
        fail()
    assert all(map(lambda one, other: one is other, net.parameters(), params))


@pytest.mark.parametrize("mode", ["fp16", "fp16-master", "bf16-master"])
@pytest.mark.parametrize("how", ["from_pretrained", "half"])
def test_a_model_that_comes_in_float16(mode: str, how: str, tmp_path: Any) -> None:
    net = model("llama")
    if how == "half":
        net.half()
    else:
        net.save_pretrained(tmp_path)
        net = type(net).from_pretrained(tmp_path, dtype=torch.float16).train()
    found = list(losses(net, precision(net, mode), batch("llama")))
    assert found[-1] < 0.7 * found[0]
    wanted = torch.float32 if mode not in MASTERS else MODES[mode].dtype
    assert net.model.layers[0].mlp.up_proj.weight.dtype is wanted
