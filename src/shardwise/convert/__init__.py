"""Other people's checkpoints, in and out; each is a `checkpoint.source.Source`, read by slices.

Reading order: `unpickle` (a pickle as data), `torch_file` (one file of torch.save), `dcp_metadata`,
`dcp_names`, `dcp` (torch's distributed checkpoints), `deepspeed_parts`,
`deepspeed` (ZeRO's), `huggingface` (safetensors weights), `detect` (which of these it is),
`importing` (a source as a checkpoint of ours), `export` (a checkpoint of ours for others).
"""
