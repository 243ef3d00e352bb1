"""Checkpoints that survive kills, power cuts, full disks and flipped bits.

Reading order: `strict_json`, `leaves`, `values`, `generators` (state that is no tensor), `files`
(the seam to the disk), `container`, `digest` (one file of tensors, hashed), `source` (tensors read
by slices), `sealed`, `manifest`, `rank_index` (what a checkpoint holds), `together`
(work on all ranks, one error for all), `write` (the commit), `chunks`, `read` (one checkpoint, out
and in), `state` (a model and its optimizer as a table of tensors), `assemble` (that table as a
manifest), `restore` (the table filled again), `folder`
(all checkpoints of a run), `loading` (which one is taken, and how), `verify` (every byte),
`single`, `saving`, `checkpoints` (the public calls: one checkpoint, one in the background, a run).
"""
