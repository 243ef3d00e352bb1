"""Train a LightningModule at ZeRO stage 3, save, and resume.

    pip install 'shardwise[lightning]'
    python examples/lightning_fit.py --ranks 2
    torchrun --nproc-per-node 2 examples/lightning_fit.py

Two things differ from plain Lightning: the import, and the name of the strategy.
"""

import argparse
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise.interop.lightning  # noqa: F401 - registers "shardwise", "shardwise_stage_0" ...

VOCAB, WIDTH, EPOCHS = 64, 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextToken(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))  # each block becomes a unit
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        (tokens,) = batch
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        loss = F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(asked: argparse.Namespace, max_epochs: int, resume: str | None) -> None:
    last = ModelCheckpoint(asked.folder, save_last=True)
    options: dict[str, Any] = {"enable_model_summary": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        strategy=f"shardwise_stage_{asked.stage}",
        accelerator="cuda" if torch.cuda.device_count() >= asked.ranks else "cpu",
        devices=asked.ranks,
        max_epochs=max_epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[last],
        logger=False,
        **options,
    )
    tokens = torch.randint(VOCAB, (256, 16), generator=torch.Generator().manual_seed(0))
    trainer.fit(NextToken(), DataLoader(TensorDataset(tokens), batch_size=8), ckpt_path=resume)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning's Trainer on sharded parameters.")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--folder", default="lightning_checkpoints", help="for checkpoints")
    asked = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    fit(asked, EPOCHS // 2, resume=None)
    fit(asked, EPOCHS, resume=f"{asked.folder}/last.ckpt")


if __name__ == "__main__":
    main()
