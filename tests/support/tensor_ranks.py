"""Tensor-parallel cases of each rank: ``python -m tests.support.tensor_ranks RANK SIZE FOLDER``.

Every rank runs the same cases and writes its results to FOLDER/RANK.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ortlab.engines.distributed import data_parallel
from tests.support.ranks import (
    FOLDER,
    LR,
    RANK,
    SIZE,
    Case,
    alone,
    data,
    digest,
    error,
    main,
    together,
)


def wide() -> nn.Module:
    """Return two pairs of layers and a layer without a partner."""
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 16)),
        *(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16, bias=False)),
        *(nn.Tanh(), nn.Linear(16, 4)),
    )


class Encoder(nn.Module):
    """torch's own layer, whose feed-forward part is partitioned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(self.embed(x)[:, None].expand(-1, 3, -1))
        scores: torch.Tensor = self.head(hidden.mean(1))
        return scores


def bert() -> nn.Module:
    from tests.support import tiny

    torch.manual_seed(2)
    return tiny.bert()


def gpt2() -> nn.Module:
    from tests.support import tiny

    torch.manual_seed(2)
    return tiny.gpt2()


def qwen3() -> nn.Module:
    """Return a Qwen3: half as many key/value heads, norms per head, transformers' own plan."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        use_cache=False,
    )
    model: nn.Module = Qwen3ForCausalLM(config)
    return model


def llama() -> nn.Module:
    """Return a Llama with half as many key/value heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def transformer(name: str, engine: str = "eager", **changes: Any) -> Case:
    """Compare a BERT, GPT-2 or Llama with one process; see `parity`."""
    make: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2, "llama": llama}
    return parity(
        make[name],
        None,
        classes if name == "bert" else tokens,
        optimizer="sgd",
        engine=engine,
        noise="key.bias" if name == "bert" else "no",
        **changes,
    )


def texts(labels: str) -> list[Any]:
    """Return batches of token ids; the last one is smaller."""
    drawn = torch.Generator().manual_seed(5)
    found = []
    for size in (8, 8, 5):
        ids = torch.randint(0, 50, (size, 12), generator=drawn)
        target = ids if labels == "tokens" else torch.randint(0, 2, (size,), generator=drawn)
        found.append({"input_ids": ids, "labels": target})
    return found


class Scaled(nn.Module):
    """A module with its own plan and a parameter between the two layers."""

    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.RMSNorm(4), nn.Linear(8, 4)
        self._tp_plan = {"first": "colwise", "second": "rowwise", **plan}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x).unflatten(-1, (-1, 4))).flatten(-2)
        scores: torch.Tensor = self.second(hidden)
        return scores


def scaled() -> nn.Module:
    return Scaled({"norm": "replicated_with_grad_allreduce"})


def others() -> dict[str, Any]:
    """Compare three steps of other architectures with one process."""
    import transformers

    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
    }
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kinds: dict[str, dict[str, Any]] = {
        "RobertaForMaskedLM": {**sizes, **still},
        "ElectraForSequenceClassification": {**sizes, **still, "embedding_size": 32},
        "DistilBertForMaskedLM": {
            "vocab_size": 50,
            "dim": 32,
            "n_layers": 1,
            "n_heads": 4,
            "hidden_dim": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "LlamaForCausalLM": {**sizes, "tie_word_embeddings": True, "use_cache": False},
        "MistralForCausalLM": {**sizes, "num_key_value_heads": 2, "use_cache": False},
    }
    found = {}
    for name, config in kinds.items():
        kind = getattr(transformers, name)
        made = []
        for prepared in (alone, together):
            torch.manual_seed(2)
            model = kind(kind.config_class(**config))
            way = {"tensor_parallel": 2} if prepared is together else {}
            made.append(prepared(model, None, optimizer="sgd", **way))
        target = "classes" if "Classification" in name else "tokens"
        worst = 0.0
        for batch in texts(target):
            one, many = (stepper.step([batch], lr=LR) for stepper in made)
            worst = max(
                worst,
                abs(float(one.loss) - float(many.loss)) / float(one.loss),
                abs(float(one.grad_norm) - float(many.grad_norm)) / float(one.grad_norm),
            )
        found[name] = [worst, made[1].report().notes[-1]]
    return found


def dropping() -> dict[str, Any]:
    """Train classes of transformers with their usual dropout; ranks compare their gradients."""
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    bert = {**sizes, "intermediate_size": 64}
    kinds: dict[str, dict[str, Any]] = {
        "BertForSequenceClassification": bert,
        "RobertaForMaskedLM": {**bert, "max_position_embeddings": 40},
        "ElectraForSequenceClassification": {**bert, "embedding_size": 32},
        "DistilBertForMaskedLM": {
            "vocab_size": 50,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
        },
        "GPT2LMHeadModel": {"vocab_size": 50, "n_embd": 32, "n_head": 4, "n_layer": 2},
        "LlamaForCausalLM": {**bert, "attention_dropout": 0.1, "use_cache": False},
    }
    found = {}
    for name, config in kinds.items():
        kind = getattr(transformers, name)
        torch.manual_seed(2)
        stepper = together(kind(kind.config_class(**config)), None, tensor_parallel=2)
        batches = texts("classes" if "Classification" in name else "tokens")
        found[name] = [float(stepper.step([batch], lr=LR).loss) for batch in batches]
    return found


def rows() -> list[Any]:
    return data(16, 9, 5)


def classes() -> list[Any]:
    return texts("classes")


def tokens() -> list[Any]:
    return texts("tokens")


def _without(state: dict[str, Any], noise: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if not name.endswith(noise)}


def parity(
    make: Callable[[], nn.Module],
    loss: Any,
    batches: Callable[[], list[Any]],
    *,
    lr: float = LR,
    ways: dict[str, int] | None = None,
    noise: str = "no",
    **changes: Any,
) -> Case:
    """Compare 50 steps of two micro-batches with one process; then the model is whole again.

    `noise` is the suffix of the names of parameters whose gradient is zero except for rounding.
    """

    def case() -> dict[str, Any]:
        few = batches()
        model = make()
        parameters, layers = dict(model.named_parameters()), dict(model.named_modules())
        with torch.no_grad():
            for tensor in parameters.values():
                tensor.add_(RANK)  # rank 0's values must replace these
        one = alone(make(), loss, max_grad_norm=0.5, **{**changes, "engine": "eager"})
        many = together(
            model, loss, max_grad_norm=0.5, **changes, **(ways or {"tensor_parallel": 2})
        )
        losses = norms = 0.0
        for number in range(50):
            pair = [few[number % len(few)], few[(number + 1) % len(few)]]
            a, b = one.step(pair, lr=lr), many.step(pair, lr=lr)
            assert a.grad_norm is not None
            losses = max(losses, abs(float(a.loss) - float(b.loss)) / abs(float(a.loss)))
            norms = max(norms, abs(float(a.grad_norm) - float(b.grad_norm)) / float(a.grad_norm))
            assert (a.samples, a.tokens) == (b.samples, b.tokens)
        alike, state, held = one.state_dict(), many.state_dict(), vars(many.bytes())
        expected, found = one.evaluate(few[-1]), many.evaluate(few[-1])
        assert expected.loss is not None
        notes = many.report().notes
        many.close()
        return {
            "losses": losses,
            "norms": norms,
            "last loss": float(a.loss),
            "weights": error(*(_without(each["model"], noise) for each in (alike, state))),
            "moments": 0.0 if noise != "no" else error(alike["optimizer"], state["optimizer"]),
            "digest": digest(state),
            "evaluated": abs(float(expected.loss) - float(found.loss)) / float(expected.loss),
            "hits": [(each.correct, each.predicted, each.samples) for each in (expected, found)],
            "held": held,
            "whole": sum(p.nbytes for p in parameters.values()),
            "notes": notes,
            "same objects": all(p is parameters[name] for name, p in model.named_parameters())
            and all(part is layers[name] for name, part in model.named_modules()),
            "left": error(dict(state["model"]), dict(model.state_dict())),
        }

    return case


def moving(make: Callable[[], nn.Module], *ways: dict[str, int]) -> Case:
    """Train ten steps in one process, in each of the `ways`, and in one process again."""

    def case() -> dict[str, Any]:
        few, loss = rows(), functional.cross_entropy
        whole = alone(make(), loss)
        parts = [None, *ways, None]
        steps = range(10 * len(parts))
        expected = [float(whole.step([few[n % 3]], lr=LR).loss) for n in steps]
        losses, state = [], None
        for begin, way in enumerate(parts):
            stepper = alone(make(), loss) if way is None else together(make(), loss, **way)
            if state is not None:
                stepper.load_state_dict(state)
            for n in steps[10 * begin : 10 * begin + 10]:
                losses.append(float(stepper.step([few[n % 3]], lr=LR).loss))
            state = stepper.state_dict()
            stepper.close()
        return {
            "expected": expected,
            "losses": losses,
            "error": error(whole.state_dict(), state),
        }

    return case


def not_finite(make: Callable[[], nn.Module], **way: int) -> Case:
    """Train on a NaN in the data; the step must change nothing on any rank."""

    def case() -> dict[str, Any]:
        stepper = together(make(), functional.cross_entropy, **way)
        good, bad = data(8, 8)
        stepper.step([good], lr=LR)
        finite, before = stepper.finite(), digest(stepper.state_dict())
        bad[0][-1] = float("nan")
        stepper.step([bad], lr=LR)
        after = digest(stepper.state_dict())
        return {"finite": [finite, stepper.finite()], "digests": [before, after]}

    return case


def dropout() -> dict[str, Any]:
    """Return the dropout masks of a split, a whole and a split, recomputed activation."""
    seen: dict[str, list[str]] = {"split": [], "whole": []}

    def keeps(name: str, dropped: torch.Tensor) -> None:
        seen[name].append("".join(str(int(each)) for each in (dropped != 0).flatten()))

    def seeing(name: str) -> nn.Module:
        made = nn.Dropout(0.5)
        made.register_forward_hook(lambda _module, _inputs, dropped: keeps(name, dropped))
        return made

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.pair = nn.Sequential(nn.Linear(6, 32), nn.Sigmoid(), seeing("split"))
            self.pair.append(nn.Linear(32, 16))
            self.rest = nn.Sequential(seeing("whole"), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.pair, x, use_reentrant=False)
            scores: torch.Tensor = self.rest(hidden)
            return scores

    (batch,), model = data(8), Twice()
    before = torch.get_rng_state()
    stepper = together(model, functional.cross_entropy, tensor_parallel=2)
    for seed in (7, 7):
        stepper.reseed(seed)
        for _ in range(2):
            stepper.step([batch], lr=0.0)
    return {**seen, "undisturbed": torch.equal(before, torch.get_rng_state())}


def failing() -> dict[str, Any]:
    """Train on rows that make the model fail, with four ranks only on the last two."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wide()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x[:, 0] > 100).any()):
                raise ValueError("a row is out of range")
            scores: torch.Tensor = self.inner(x)
            return scores

    one, many = (
        alone(Picky(), functional.cross_entropy),
        together(Picky(), functional.cross_entropy, tensor_parallel=2),
    )
    good, bad = data(8, 8)
    bad[0][-1, 0] = 101.0
    told = "nothing"
    try:
        many.step([good, bad], lr=LR)
    except (data_parallel.RankFailed, ValueError) as raised:
        told = f"{type(raised).__name__}: {raised}"
    one.step([good], lr=LR)
    many.step([good], lr=LR)
    return {"told": told, "error": error(one.state_dict(), many.state_dict())}


def refused() -> dict[str, Any]:
    """Return the errors for models that cannot be partitioned and for an incomplete plan."""
    from tests.support import tiny

    tied = wide()
    tied[7].weight = tied[5].weight = nn.Parameter(torch.randn(16, 16))
    told = []
    for model in (
        nn.Sequential(nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)),
        tiny.gpt2(n_head=1),
        tiny.bert(num_attention_heads=1),
        tied,
        Scaled({"norm": "sequence_parallel"}),
        Scaled({}),
    ):
        before = digest(dict(model.state_dict()))
        stepper = None
        try:
            stepper = together(model, functional.cross_entropy, tensor_parallel=2)
            stepper.step(data(8), lr=LR)
            told.append("nothing")
        except (ValueError, RuntimeError) as raised:
            told.append(f"{type(raised).__name__}: {raised}")
        if stepper is not None:
            stepper.close()
        same = digest(dict(model.state_dict())) == before
        told.append("unchanged" if same else "changed")
    return {"told": told}


def again() -> dict[str, Any]:
    """Train three steps in a process group made after another one has ended."""
    dist.destroy_process_group()
    store = dist.FileStore(str(FOLDER / "again"), SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE)
    dist.new_group(list(range(SIZE)))  # so that groups have other names than before
    one, many = (
        alone(wide(), functional.cross_entropy),
        together(wide(), functional.cross_entropy, tensor_parallel=2),
    )
    losses = [[float(each.step([batch], lr=LR).loss) for each in (one, many)] for batch in rows()]
    return {"losses": losses}


CASES: dict[int, dict[str, Case]] = {
    2: {
        "sequential": parity(wide, functional.cross_entropy, rows),
        "sequential sgd": parity(wide, functional.cross_entropy, rows, optimizer="sgd"),
        **{name: transformer(name) for name in ("bert", "gpt2", "llama")},
        "encoder": parity(Encoder, functional.cross_entropy, rows, optimizer="sgd"),
        "scaled": parity(scaled, functional.cross_entropy, rows),
        "qwen3": parity(qwen3, None, tokens, lr=3e-4),
        "bf16": parity(wide, functional.cross_entropy, rows, precision="bf16", optimizer="sgd"),
        "others": others,
        "moving": moving(wide, {"tensor_parallel": 2}),
        "not finite": not_finite(wide, tensor_parallel=2),
        "dropout": dropout,
        "dropping": dropping,
        "failing": failing,
        "refused": refused,
    },
    4: {
        "sequential": parity(wide, functional.cross_entropy, rows),
        "zero": parity(
            wide, functional.cross_entropy, rows, ways={"tensor_parallel": 2, "zero_stage": 1}
        ),
        "failing": failing,
        "again": again,
    },
}

if __name__ == "__main__":
    main(CASES[SIZE])
