"""A sequence that is cut over ranks has the gradients of one process that has it whole."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise
from ranks import on_ranks
from roundings import assert_all_rounded_alike, assert_rounded_alike, of_gradient
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from shardwise.parallel.attention import AttentionCall, attend
from shardwise.parallel.context import is_cut
from shardwise.parallel.sequences import SequenceCut, cut_of
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.shapes import DecoderShape

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, ROWS = 23, 12, 2, 6, 3, 4, 16, 4
IGNORED = -100
SHAPE = DecoderShape(LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB)


def of_one_document(mask, documents):
    """Return where a query and a key are of one document."""
    marks = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    return mask & (marks[:, None] == marks[None])


# -- which tokens lie where


@given(documents=st.lists(st.integers(1, 40), min_size=1, max_size=8), num_ranks=st.integers(1, 9))
def test_every_token_lies_on_one_rank_and_ranks_have_as_many_of_them(documents, num_ranks):
    cut = SequenceCut(tuple(documents), num_ranks)
    tokens = [cut.tokens(rank) for rank in range(num_ranks)]
    assert sorted(token for mine in tokens for token in mine) == list(range(sum(documents)))
    counts = list(cut.counts)
    assert counts == [len(mine) for mine in tokens]
    assert max(counts) - min(counts) <= 1
    starts = [sum(documents[:i]) for i in range(len(documents))]
    for spans in cut.spans:
        for span in spans:
            inside = [lo for lo, n in zip(starts, documents, strict=True) if lo <= span.lo < lo + n]
            assert inside == [span.document] and span.lo < span.hi
            assert span.hi <= span.document + documents[starts.index(span.document)]


@given(chunk=st.integers(1, 20), num_ranks=st.integers(1, 8))
def test_ranks_have_as_many_pairs_of_a_query_and_a_key(chunk, num_ranks):
    cut = cut_of(2 * num_ranks * chunk, num_ranks)
    products = [  # pairs of a query and a key that it sees
        sum(sum(range(s.lo - s.document + 1, s.hi - s.document + 1)) for s in cut.spans[rank])
        for rank in range(num_ranks)
    ]
    assert len(set(products)) == 1
    assert sum(products) == cut.length * (cut.length + 1) // 2


def test_documents_that_are_not_the_sequence_are_refused():
    with pytest.raises(ConfigError, match="their lengths sum to 7, but the sequence has 8 tokens"):
        cut_of(8, 2, [3, 4])
    with pytest.raises(ConfigError, match="expected their lengths, each at least 1"):
        cut_of(8, 2, [8, 0])


# -- attention


def check_attention(context, rank, length, documents, causal, masked):
    cut = cut_of(length, context.exchange.axis.size, documents)
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, length, 4) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for x in whole[:3]:
        x.requires_grad_()
    sees = torch.ones(length, length, dtype=torch.bool)
    sees = of_one_document(sees.tril() if causal else sees, documents or (length,))
    bias = torch.randn(1, HEADS, length, length, generator=generator, dtype=torch.float64)
    plain = F.scaled_dot_product_attention(
        *whole[:3], attn_mask=bias if masked else sees, scale=0.3, enable_gqa=True
    )
    plain.backward(whole[3])
    places = torch.tensor(cut.tokens(rank), dtype=torch.int64)
    methods = ["gather"] + ["heads"] * (HEADS % cut.num_ranks == 0)
    if causal and documents is None and length % (2 * cut.num_ranks) == 0:
        methods += ["ring"]
    for method in methods:
        dtype = torch.float32 if method == "ring" else torch.float64  # what torch's ring sums in
        parts = [x.detach().to(dtype)[:, :, places].requires_grad_() for x in whole[:3]]
        mask = bias if masked else None
        call = AttentionCall(*parts, attn_mask=mask, is_causal=causal, scale=0.3, enable_gqa=True)
        mixed = attend(call, cut, context.exchange, method)
        roundings = 8 * length
        wanted = plain.index_select(2, places).to(dtype)
        scale = plain.abs().max().item()
        assert_rounded_alike(mixed, wanted, roundings, method, scale=scale)
        mixed.backward(whole[3].to(dtype).index_select(2, places))
        for part, x in zip(parts, whole[:3], strict=True):
            wanted, scale = x.grad.to(dtype)[:, :, places], x.grad.abs().max().item()
            assert part.grad is not None
            assert_rounded_alike(part.grad, wanted, roundings, method, scale=scale)


@on_ranks(1, 2, 3, 4)
def test_attention_over_parts_is_that_of_the_whole_sequence(rank, num_ranks):
    context = shardwise.parallel.ContextParallel(nn.Linear(1, 1), shardwise.Axes(cp=num_ranks))
    for length, documents in ((24, None), (25, None), (24, (3, 1, 12, 8)), (2, None)):
        for causal in (True, False):
            for masked in (False, True) if documents is None else (False,):
                check_attention(context, rank, length, documents, causal and not masked, masked)


# -- models


def make(checkpointed=False):
    torch.manual_seed(1)
    return PlainDecoder(SHAPE, checkpointed)


def loss_of(model, ids, labels, positions):
    logits = model(ids, positions=positions)
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def whole_loss(model, ids, labels, documents):
    """Return the mean of one process, which has each document as a sequence of its own."""
    total = torch.zeros(())
    for part, wanted in zip(
        ids.split(list(documents), 1), labels.split(list(documents), 1), strict=True
    ):
        total = total + loss_of(model, part, wanted, torch.arange(part.shape[1]))
    return total / (labels != IGNORED).sum()


def check_bytes(context, method, documents, rows, checkpointed):
    """Compare what `stats` counts with what the method says that a rank sends."""
    ranks, rank = context.exchange.axis.size, context.exchange.axis.rank
    cut = cut_of(sum(documents), ranks, documents)
    counts = list(cut.counts)
    here, others = counts[rank], sum(counts) - counts[rank]
    vector = 4 * HEAD_DIM * rows * LAYERS
    passes = 2 if checkpointed else 1  # forward, and again in the backward pass
    if ranks == 1:
        wanted = {}
    elif method == "ring":  # keys and values with a head for each query's, gradients in fp32
        part = 2 * HEADS * here * vector
        wanted = {"cp.ring": (passes + 1) * part * (ranks - 1) + part * ranks}
    elif method == "gather":
        most = max(counts)  # shorter parts are filled up
        sent = 2 * KV_HEADS * most * (ranks - 1) * vector
        wanted = {"cp.all_gather": passes * sent, "cp.all_to_all": sent}
    else:
        kv_heads = KV_HEADS if KV_HEADS % ranks == 0 else HEADS
        inputs, outputs = (HEADS + 2 * kv_heads) // ranks, HEADS // ranks
        forward = inputs * here * (ranks - 1) + outputs * others
        backward = inputs * others + outputs * here * (ranks - 1)
        wanted = {"cp.all_to_all": (passes * forward + backward) * vector}
    counted = shardwise.debug.stats(context.model).sent_bytes
    found = {kind: n for kind, n in counted.items() if kind.startswith("cp.")}
    assert found == wanted, (method, found, wanted, documents, checkpointed)


Axes = shardwise.Axes
CASES = {
    1: [(Axes(), "gather", 3, (12,), False), (Axes(), "heads", 3, (5, 7), True)],
    2: [
        (Axes(cp=2), "gather", 3, (16,), True),
        (Axes(cp=2), "heads", 3, (15,), False),
        (Axes(cp=2), "heads", None, (3, 9, 4), True),
        (Axes(cp=2), "gather", 0, (17,), False),
    ],
    3: [
        (Axes(cp=3), "heads", 1, (18,), False),
        (Axes(cp=3), "gather", 3, (7, 2, 11), False),
        (Axes(cp=3), "gather", None, (2,), False),  # a rank has no token
        (Axes(cp=3), "heads", 2, (2,), False),
    ],
    4: [
        (Axes(cp=2), "gather", 3, (12,), False),
        (Axes(cp=2, dp_replicate=2), "heads", 3, (5, 11), False),
        (Axes(cp=4), "gather", 2, (16,), False),
        (Axes(cp=4), "ring", 3, (16,), True),
        (Axes(cp=2, dp_replicate=2), "gather", None, (12,), False),
    ],
}


@pytest.mark.parametrize("num_ranks", sorted(CASES))
@on_ranks()
def test_a_cut_step_has_the_gradients_of_one_process(num_ranks):
    for axes, method, stage, documents, checkpointed in CASES[num_ranks]:
        length = sum(documents)
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(VOCAB, (ROWS, length), generator=generator)
        labels = torch.randint(VOCAB, (ROWS, length), generator=generator)
        labels[:, : length // 3] = IGNORED  # ranks have different numbers of tokens
        labels[0] = IGNORED
        plain = make()
        wanted = whole_loss(plain, ids, labels, documents)
        wanted.backward()
        model = make(checkpointed)
        if stage is None:
            for block in model.blocks:
                fully_shard(block, mesh=axes)
            model = fully_shard(model, mesh=axes)
        else:
            model = shardwise.shard(model, mesh=axes, stage=stage)
        context = shardwise.parallel.ContextParallel(model, axes, method=method)
        group = axes.data.size() // axes.cp
        each = ROWS // group
        row = axes["dp_replicate"].get_local_rank() * axes["dp_shard"].size()
        row = (row + axes["dp_shard"].get_local_rank()) * each
        mine = slice(row, row + each)
        packed = None if len(documents) == 1 else documents
        with context.cut(ids[mine], labels[mine], documents=packed) as (part, labelled, positions):
            total = loss_of(model, part, labelled, positions)
            loss = shardwise.parallel.mean_loss(model, total, (labelled != IGNORED).sum())
            loss.backward()
        # Three sums over rows of 12 or 16 in each half block, softmax over the length, the head.
        roundings = of_gradient(*[DIM, length, DIM, FFN] * LAYERS, DIM, over=length * ROWS)
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        theirs = {name: p.grad for name, p in plain.named_parameters()}
        assert_all_rounded_alike(grads, theirs, roundings)
        shown = torch.tensor([loss.item()])
        torch.distributed.all_reduce(shown)
        shown = shown / num_ranks
        assert_rounded_alike(shown, wanted.detach().reshape(1), roundings, "loss")
        check_bytes(context, method, documents, each, checkpointed)


@on_ranks(2)
def test_what_would_train_on_a_part_without_a_word_is_refused(rank, num_ranks):
    ids = torch.zeros(1, 12, dtype=torch.int64)
    axes = shardwise.Axes(cp=num_ranks)
    with pytest.raises(
        ConfigError, match="method='rings': expected one of 'gather', 'heads', 'ring'"
    ):
        shardwise.parallel.ContextParallel(make(), axes, method="rings")
    with pytest.raises(ConfigError, match=r"its axes \('dp_shard',\) name no 'cp'"):
        shardwise.parallel.ContextParallel(make(), shardwise.Axes()["dp_shard"])

    model = shardwise.shard(make(), mesh=axes)
    context = shardwise.parallel.ContextParallel(model, axes, method="heads")
    part = torch.zeros(1, 5, 12 // num_ranks, 4)
    mask = torch.ones(12 // num_ranks, 12 // num_ranks, dtype=torch.bool)

    def refused(match, *tensors, of=context, query=None, documents=None, **how):
        """Cut tensors, and call attention if there is a query."""
        with pytest.raises(ConfigError, match=match), of.cut(*tensors, documents=documents):
            if query is not None:
                F.scaled_dot_product_attention(query, query, query, **how)

    # Weight gradients must be summed over cp, also where it is the only axis (torchtitan#685).
    meshes = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("other", "own"))
    apart = shardwise.shard(make(), mesh=meshes["own"])
    apart = shardwise.parallel.ContextParallel(apart, axes)
    refused("its gradients are not summed over the axis 'cp'", ids, of=apart)
    # A model whose attention is not found would train on its own part (torchtitan#2808).
    refused(f"no attention over parts of {12 // num_ranks} tokens", ids)
    refused(r"along dim 1 the tensors have \[12, 11\] tokens", ids, ids[:, 1:])
    refused("expected the tensors that have a sequence")
    refused(f"cp={num_ranks} does not divide the 5 heads", ids, query=part)
    refused("the mask has the shape .* covers all its tokens", ids, query=part, attn_mask=mask)
    packed = {"documents": [4, 8], "query": part}
    refused("attn_mask and documents= are both given", ids, attn_mask=mask, **packed)
    ring = shardwise.parallel.ContextParallel(model, axes, method="ring")
    packed_ring = "by ring: documents are packed, which torch's ring"
    refused(packed_ring, ids, of=ring, is_causal=True, **packed)
    both = {"attn_mask": mask, "is_causal": True}
    refused("attn_mask and is_causal=True are both given", ids, query=part, **both)
    of_rank = DTensor.from_local(part, axes["tp"], [Shard(1)])
    refused("got a DTensor", ids, query=of_rank, is_causal=True)
    # Attention of the outer one would be computed over the inner one's documents.
    with context.cut(ids, documents=[4, 8]):
        with (
            pytest.raises(ConfigError, match="a sequence is cut already"),
            shardwise.parallel.ContextParallel(model, axes).cut(ids),
        ):
            pass
        F.scaled_dot_product_attention(*[torch.zeros(1, 2, 12 // num_ranks, 4)] * 3)
    assert not is_cut()
    # 6 and 7 tokens: to the rank of 7, keys of 7 tokens look like its part of the sequence.
    last = rank == num_ranks - 1
    with context.cut(torch.zeros(1, 13)) as (_, positions):
        part = torch.zeros(1, 2, positions.shape[1], 4)
        F.scaled_dot_product_attention(part, part, part, is_causal=True)
        if last:
            keys = torch.zeros(1, 2, 7, 4)
            with pytest.raises(ConfigError, match="from 6 tokens, this rank's part, to 7 keys"):
                F.scaled_dot_product_attention(part, keys, keys)
    # Attention over something else inside is torch's, and so is all of it afterwards.
    other = torch.randn(1, 5, 7, 4)
    wanted = F.scaled_dot_product_attention(other, other, other, is_causal=True)
    with pytest.raises(ConfigError, match="no attention over parts"), context.cut(ids):
        found = F.scaled_dot_product_attention(other, other, other, is_causal=True)
        assert torch.equal(found, wanted)
    part = torch.randn(1, 5, 12 // num_ranks, 4)
    assert F.scaled_dot_product_attention(part, part, part).shape == part.shape


@on_ranks(4)
def test_contexts_of_one_model_are_over_their_own_ranks(num_ranks):
    model = shardwise.shard(nn.Linear(1, 1))
    sent = 0
    for cp in (2, num_ranks):
        context = shardwise.parallel.ContextParallel(model, shardwise.Axes(cp=cp))
        x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(cp))
        wanted = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        with context.cut(x, wanted) as (part, mine, positions):  # one head, as [B, t, E]
            found = F.scaled_dot_product_attention(part, part, part, is_causal=True)
        assert positions.tolist() == [cut_of(8, cp).tokens(context.exchange.axis.rank)]
        assert_rounded_alike(found, mine, 8, scale=1)
        sent += 2 * (8 // cp) * (4 + 4) * (cp - 1) * 4
        assert shardwise.debug.stats(model).sent_bytes["cp.all_gather"] == sent


def test_what_others_put_in_the_place_of_torchs_attention_is_no_cut(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: args[0])
    assert not is_cut()
