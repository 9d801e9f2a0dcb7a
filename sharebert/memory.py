"""Memory that one process takes in training, from sizes alone: nothing is run.

Counted are the tensors that live at once where an update needs most; an allocator adds to that. Every term is named
after the code it describes, and what autograd keeps of a layer and of the head is compared with torch in
tests/test_memory.py.

Legend: B sequences of a micro-batch, T tokens, K prediction slots, D hidden size, F feed-forward size, H heads, L
layers, W the vocabulary's padded size.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from sharebert.config import ModelConfig, OptimConfig
from sharebert.loss import CHUNK_NUMBERS
from sharebert.model.bert import padded_vocabulary_size

GIB = 2**30

CPU_PROGRAM_BYTES = 346 * 2**20
"""Python with torch, its kernels and all that is loaded in the first update; fitted to measurements."""
CPU_GAPS_IN_TENSORS, CPU_GAPS_IN_EMBEDDINGS, CPU_GAPS_IN_LAYERS = 0.09, 1.4, 1.6
"""Gaps in glibc's heap (:mod:`sharebert.allocator`), as shares of all tensors, of the token embedding and of what a
layer keeps: what comes and goes in the largest pieces leaves the largest holes. Fitted to measurements."""
CUDA_PROGRAM_BYTES = 600 * 2**20
"""CUDA's context and the work space of its libraries; a rule of thumb, not measured."""
CUDA_OVERHEAD = 1.05
"""Memory that torch's CUDA allocator takes for one byte of tensors; a rule of thumb, not measured."""


@dataclass(frozen=True)
class Pass:
    """What the memory of a forward and backward pass over one micro-batch depends on."""

    model: ModelConfig
    vocab_size: int
    seq_len: int
    slots: int
    """Prediction slots of a sequence."""
    precision: str
    """`bf16`, `fp16` or `fp32`."""
    device: str
    """`cpu` or `cuda`."""
    micro_batch_size: int
    activation_checkpointing: bool = False
    has_documents: bool = False
    """Whether attention gets a mask of documents (`data.cross_document_attention=false`)."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a number in the matrix products."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """B T."""
        return self.micro_batch_size * self.seq_len

    @property
    def predictions(self) -> int:
        """B K."""
        return self.micro_batch_size * self.slots


# ---------------------------------------------------------------------- what autograd keeps


def dropout_bytes(run: Pass, numbers: int, probability: float, item_bytes: int) -> int:
    """The factors by which `numbers` were multiplied: numbers on a CPU, a mask on CUDA."""
    if probability == 0.0:
        return 0
    return numbers * (item_bytes if run.device == "cpu" else 1)


def attention_bytes(run: Pass, queries: int) -> int:
    """Kept between the projections of one layer: all but the input of the last, which is its own term.

    A CPU keeps query, key, value and the probabilities of every head; a fused kernel the former and a number a row.
    """
    D, H, item = run.model.hidden_size, run.model.num_heads, run.item_bytes
    pairs = queries * run.seq_len
    kept = item * (queries + 2 * run.tokens) * D
    if run.device == "cuda":
        return kept + 4 * queries * H + (item * pairs if run.has_documents else 0)  # the mask as numbers to add
    kept += item * pairs * H  # the softmax
    if run.model.attention_dropout > 0.0:
        kept += item * pairs * H + dropout_bytes(run, pairs * H, run.model.attention_dropout, item)
    return kept + (pairs if run.has_documents else 0)  # the mask, a byte each, once for all heads


def weight_copy_bytes(run: Pass) -> int:
    """The matrices of one layer in 16 bits; autocast makes them in every layer, shared or not."""
    D, F = run.model.hidden_size, run.model.intermediate_size
    return 0 if run.precision == "fp32" else run.item_bytes * (4 * D * D + 2 * D * F)


def layer_bytes(run: Pass, is_last: bool = False) -> int:
    """All that one layer keeps for its backward pass, without its own parameters.

    The last layer computes the prediction slots only, and has the queries' tokens besides those of keys and values.
    """
    D, F, item = run.model.hidden_size, run.model.intermediate_size, run.item_bytes
    computed = run.predictions if is_last else run.tokens
    normed = (run.tokens if run.model.norm == "pre" else computed) + computed
    norms = normed * (4 * D + 8)  # the inputs in fp32, mean and rate of every row
    products = item * (run.tokens * D + computed * (2 * D + F))  # inputs of qkv, output, up, down
    if is_last:
        products += item * computed * D + 8 * computed  # input of the queries; the slots
        products += 0 if item == 4 else 4 * run.tokens * D  # what the tokens at the slots are gathered from
    activation = item * computed * F  # input of the GELU
    dropouts = 2 * dropout_bytes(run, computed * D, run.model.dropout, item)
    return norms + products + activation + dropouts + attention_bytes(run, computed) + weight_copy_bytes(run)


def encoder_bytes(run: Pass) -> int:
    """Kept by all layers; with activation checkpointing only what goes into each."""
    if run.activation_checkpointing:
        return run.model.num_layers * 4 * run.tokens * run.model.hidden_size
    return (run.model.num_layers - 1) * layer_bytes(run) + layer_bytes(run, is_last=True)


def embedding_bytes(run: Pass) -> int:
    """Kept by the embeddings, with their norm (Post-LN)."""
    D = run.model.hidden_size
    norm = run.tokens * (4 * D + 8) if run.model.norm == "post" else 0
    return 8 * run.tokens + norm + dropout_bytes(run, run.tokens * D, run.model.dropout, 4)


def head_bytes(run: Pass) -> int:
    """Kept by the norm that ends the encoder (Pre-LN) and the masked-LM head, with its weights in 16 bits."""
    D, W, item = run.model.hidden_size, padded_vocabulary_size(run.vocab_size), run.item_bytes
    kept = run.predictions * (4 * item * D + 8)  # inputs of dense, GELU, norm and decoder; the norm's rows
    kept += run.predictions * (4 * D + 8) if run.model.norm == "pre" else 0
    return kept + (0 if run.precision == "fp32" else item * (D * D + W * D))


def logit_bytes(run: Pass) -> int:
    """The logits; the backward pass of the loss writes their gradient over them."""
    return run.predictions * padded_vocabulary_size(run.vocab_size) * run.item_bytes


def loss_bytes(run: Pass) -> int:
    """What the loss needs besides the logits: some rows of them in fp32, and their softmax."""
    return 2 * 4 * min(CHUNK_NUMBERS, run.predictions * padded_vocabulary_size(run.vocab_size))


# ---------------------------------------------------------------------- where an update needs most


@dataclass(frozen=True)
class Held:
    """Bytes of one process that do not depend on the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    sample: int = 0
    """Weights that are copied to measure `share/update_to_weight`."""
    check: int = 0
    """Gradients of a check, when those of every unit are there one by one; 0: there are no checks."""
    built: int = 0
    """Weights of the model as it is built, with those of every layer, before the layers share them; on a CPU."""

    @property
    def state(self) -> int:
        """What outlives an update."""
        return self.weights + self.optimizer


def held_bytes(unique: int, optim: OptimConfig, *, sampled: int = 0, checked: int = 0, built: int = 0) -> Held:
    """Memory of parameters in fp32, from how many there are.

    Args:
        unique: parameters that are trained.
        optim: decides how many moments there are.
        sampled: those that are sampled for `share/update_to_weight`.
        checked: numbers in all gradients of a check of the correlations.
        built: parameters of the model before its layers share.
    """
    moments = 2 if optim.name == "adamw" else 0
    return Held(4 * unique, 4 * unique, moments * 4 * unique, 4 * sampled, 4 * checked, 4 * built)


def tensor_bytes(run: Pass, held: Held, keeps_gradients: bool) -> int:
    """Most bytes of tensors that live at once in an update.

    Args:
        run: the micro-batch.
        held: parameters, gradients and optimizer state.
        keeps_gradients: whether gradients are there while a forward pass runs: with several micro-batches in an
            update, and under DDP, whose buckets hold them all along.
    """
    D, F, W = run.model.hidden_size, run.model.intermediate_size, padded_vocabulary_size(run.vocab_size)
    before = held.state + (held.gradients if keeps_gradients else 0)
    kept = encoder_bytes(run) + embedding_bytes(run)
    embedding = 4 * W * D  # the gradient of the token embedding, once from the decoder, once from the input
    decoder = embedding + (0 if run.precision == "fp32" else run.item_bytes * W * D)  # in 16 bits and in fp32
    logits = logit_bytes(run)  # the loop holds them until the backward pass is done
    moving = run.tokens * F * run.item_bytes * 2 + D * F * (4 + run.item_bytes)  # gradients on their way in a layer
    recomputed = layer_bytes(run) if run.activation_checkpointing else 0
    return max(
        before + kept + logits + head_bytes(run) + max(loss_bytes(run), decoder),
        before + kept + logits + embedding + moving + recomputed,
        held.state + held.gradients + logits + embedding * (2 if keeps_gradients else 1),
        held.state + max(held.gradients + held.sample, 2 * held.sample),
        held.state + held.check + embedding if held.check else 0,
        held.built if run.device == "cpu" else 0,
        held.state + 4 * run.predictions * W + loss_bytes(run),  # held-out scores are in fp32
    )


def process_bytes(run: Pass, held: Held, keeps_gradients: bool) -> int:
    """Memory of the process (resident, on a CPU) or of the GPU: tensors, gaps between them, and the program."""
    tensors = tensor_bytes(run, held, keeps_gradients)
    if run.device == "cpu":
        embedding = 4 * padded_vocabulary_size(run.vocab_size) * run.model.hidden_size
        activations = layer_bytes(run) - weight_copy_bytes(run)
        gaps = CPU_GAPS_IN_TENSORS * tensors + CPU_GAPS_IN_EMBEDDINGS * embedding + CPU_GAPS_IN_LAYERS * activations
        return CPU_PROGRAM_BYTES + int(gaps) + tensors
    return CUDA_PROGRAM_BYTES + int(CUDA_OVERHEAD * tensors)


# ---------------------------------------------------------------------- what there is


def free_bytes(device: str) -> int | None:
    """Memory that a process could take on this machine now; None where that is not known (CUDA without a GPU)."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    found = [value for value in (_available_bytes(), _group_bytes()) if value is not None]
    return min(found, default=None)


def _available_bytes() -> int | None:
    """What the kernel says could be had without swapping; elsewhere all of the machine's memory."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _group_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What is left of a container's limit (control groups, version 2); None without one."""
    try:
        limit, used = (int((folder / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
    except (OSError, ValueError):  # no such file, or `max`
        return None
    return max(0, limit - used)
