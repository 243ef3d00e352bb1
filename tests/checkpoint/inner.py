"""The inner names of checkpoint/ that its tests use: when one moves, only this file changes."""
# ruff: noqa: F401

from shardwise.checkpoint.all_ranks import (
    collector_paused,
    explain,
    on_all_ranks,
    rows_of_all_ranks,
)
from shardwise.checkpoint.assemble import assemble
from shardwise.checkpoint.checkpoints import Checkpoints, Saving
from shardwise.checkpoint.container import (
    CHUNK_BYTES,
    DIGEST_CHARS,
    Stored,
    build_header,
    chunk_digests,
    digest_of,
    dtype_name,
    element_bytes,
    is_dtype,
    memory_of,
    parse_header,
    place,
    read_header,
    torch_dtype,
)
from shardwise.checkpoint.files import Entry, Files, Lock, Reader, Writer, read_text
from shardwise.checkpoint.folder import (
    LOCK,
    choose,
    clean_up,
    hold,
    is_held,
    let_go,
    lock_holder,
    remove_checkpoint,
    remove_tree,
    rotate,
    step_name,
    steps_in,
    take_lock,
    temporary,
)
from shardwise.checkpoint.generators import derive_generators, read_generators, set_generators
from shardwise.checkpoint.manifest import (
    MANIFEST,
    FileRow,
    IndexRow,
    LayoutRow,
    Manifest,
    OptimizerRow,
    OwnRow,
    RankIndex,
    TensorRow,
    file_name,
    index_name,
    is_ours,
    parse_index,
    parse_manifest,
    seal,
    unseal,
)
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.save_load import Load
from shardwise.checkpoint.source import Kind, TensorInfo
from shardwise.checkpoint.state import Item, Ranks, Table
from shardwise.checkpoint.values import decode, encode
from shardwise.checkpoint.verify import Verified, check_quickly, verify
from shardwise.checkpoint.write import Part, Written, index_row, write_checkpoint, write_rank
from shardwise.strict_json import dumps, loads
