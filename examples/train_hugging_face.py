"""Trains a Hugging Face model with jitact's activations in it: two lines more than without.

``python examples/train_hugging_face.py`` trains a small language model from scratch on this file's own text, on a GPU if there
is one, or in a minute or two on two cores. Any model goes the same way; give ``--model`` a name or a folder to fine-tune one.
Needs ``pip install transformers``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import jitact


def make_model(name: str | None) -> nn.Module:
    """The model of a name or a folder, or else a small one with random weights, whose tokens are bytes."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return AutoModelForCausalLM.from_config(config)


def batches(text: Tensor, size: int, length: int) -> Tensor:
    """Random pieces of a text, ``(size, length)``."""
    starts = torch.randint(len(text) - length, (size,)).tolist()
    return torch.stack([text[start : start + length] for start in starts])


def main(arguments: list[str] | None = None) -> float:
    """Trains, and returns the last loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a model to fine-tune; one made here is trained by default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true", help="train the model under torch.compile")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    model = make_model(args.model)
    print(jitact.replace(model))  # what is jitact's now, what is not, and why; weights and state_dict stay as they are
    model = model.to(device).train()
    model_step = torch.compile(model) if args.compile else model

    text = torch.tensor(list(Path(__file__).read_bytes()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin, loss = time.perf_counter(), torch.tensor(0.0)
    for step in range(args.steps):
        tokens = batches(text, 16, 128).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model_step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {loss.item():.3f}  {time.perf_counter() - begin:.1f} s")

    jitact.restore(model)  # before saving, so that loading needs no jitact; a state_dict is the same with and without
    return loss.item()


if __name__ == "__main__":
    main()
