"""Train a LightningModule at ZeRO stage 3, save, and resume.

    pip install 'shardwise[lightning]'
    torchrun --nproc-per-node 2 examples/lightning_fit.py
    python examples/lightning_fit.py

Two things differ from plain Lightning: the import, and the name of the strategy.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise.interop.lightning  # noqa: F401 - registers "shardwise", "shardwise_stage_0" ...

RANKS, VOCAB, WIDTH, EPOCHS = 2, 64, 64, 4


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class NextToken(lightning.LightningModule):
    _no_split_modules = ("Block",)  # each becomes a unit

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)) for _ in range(4)]
        self.model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        (tokens,) = batch
        target = (7 * tokens + 3) % VOCAB  # the function to learn
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), target.flatten())
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}  loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(folder: str, max_epochs: int, resume: str | None) -> None:
    trainer = lightning.Trainer(
        strategy="shardwise_stage_3",
        accelerator="cuda" if torch.cuda.device_count() >= RANKS else "cpu",
        devices=RANKS,
        max_epochs=max_epochs,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)],
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    tokens = torch.randint(VOCAB, (256, 16), generator=torch.Generator().manual_seed(0))
    trainer.fit(NextToken(), DataLoader(TensorDataset(tokens), batch_size=8), ckpt_path=resume)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/lightning", help="for checkpoints")
    folder = parser.parse_args().folder
    lightning.seed_everything(0, verbose=False)
    fit(folder, EPOCHS // 2, resume=None)
    fit(folder, EPOCHS, resume=f"{folder}/last.ckpt")


if __name__ == "__main__":
    main()
