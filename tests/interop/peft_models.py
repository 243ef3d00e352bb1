"""Models with adapters for the tests of PEFT: bases in several dtypes, by PEFT and by hand.

All sizes are even, so that two ranks cut them without padding and bytes can be compared exactly.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_llama():
    from transformers_models import make_llama

    return make_llama()


def lora_llama(
    dtype=torch.float32,
    adapters=("default",),
    autocast=True,
    targets=("q_proj", "v_proj", "down_proj", "lm_head"),
    **options,
):
    """Return a Llama of `dtype` with LoRA in its blocks and in the root unit."""
    import peft

    torch.manual_seed(0)
    config = partial(
        peft.LoraConfig,
        r=4,
        target_modules=list(targets),
        lora_dropout=0.1,
        init_lora_weights=False,  # B is not zero, so every adapter makes a difference
        task_type="CAUSAL_LM",
        **options,
    )
    model = peft.get_peft_model(
        make_llama().to(dtype), config(), adapters[0], autocast_adapter_dtype=autocast
    )
    for name in adapters[1:]:
        model.add_adapter(name, config())
    return model


class Int8Linear(nn.Linear):
    """A linear map whose weight is stored in int8 with a scale per row, as a frozen parameter."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features)
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = (plain.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = plain.bias

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class HandLora(nn.Module):
    """An adapter without PEFT, around any linear map."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Block(nn.Module):
    def __init__(self, make_linear):
        super().__init__()
        self.up = make_linear(nn.Linear(8, 12))
        self.down = nn.Linear(12, 8).requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Three blocks and a head; takes and gives what Llama does, as far as the tests need it."""

    def __init__(self, make_linear):
        super().__init__()
        self.embed = nn.Embedding(64, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(make_linear) for _ in range(3))
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def hand_made():
    """Return a stack with adapters by hand over a bf16 base; its head is trained as it is."""
    torch.manual_seed(0)
    model = Stack(HandLora)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module is not model.head:
            module.to(torch.bfloat16)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))
        block.up.a.data = block.up.a.data.bfloat16()
        block.up.b.data = block.up.b.data.bfloat16()
    model.head.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
    return model


def lora_int8():
    """Return a stack whose blocks hold int8 weights, with PEFT's LoRA over them."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["up"], modules_to_save=["head"], init_lora_weights=False
    )
    return peft.get_peft_model(Stack(Int8Linear), config)


VARIANTS = {
    "fp32": lora_llama,
    "bf16 base, fp32 adapters": partial(lora_llama, torch.bfloat16),
    "bf16 base and adapters": partial(lora_llama, torch.bfloat16, autocast=False),
    "dora and a whole module": partial(lora_llama, use_dora=True, modules_to_save=["embed_tokens"]),
    "int8 base": lora_int8,
    "by hand": hand_made,
}


def loss_of(model, ids):
    """Return the next-token loss, of Llama's output or of bare logits."""
    output = model(input_ids=ids)
    logits = output if isinstance(output, Tensor) else output.logits
    logits = logits[:, -ids.shape[1] :]  # those of a prompt come first
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
