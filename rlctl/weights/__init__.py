"""The tensor data plane: how weights are described, digested, read, sent and put into place.

Nothing here knows of gRPC or of the coordinator; the trainer's publisher and the engines are built on it. It imports
torch, so it is imported only by code that handles tensors.

- :mod:`rlctl.weights.tensor.tensors` names, dtypes, shapes, and a tensor's bytes.
- :mod:`rlctl.weights.tensor.digest` the digests: of a tensor, of a rank's module, of a model.
- :mod:`rlctl.weights.checkpoint.safetensors_file` one safetensors file: its header, and reading its bytes into memory.
- :mod:`rlctl.weights.checkpoint.parallel_read` reading parts of tensors straight into place, on several cores.
- :mod:`rlctl.weights.checkpoint.checkpoint` safetensors checkpoints on disk, whole tensors or slices.
- :mod:`rlctl.weights.checkpoint.load_formats` load formats by name, loaders of one's own among them.
- :mod:`rlctl.weights.checkpoint.allowed_roots` the directories that paths in requests may lead to.
- :mod:`rlctl.weights.versions.publish` versions as files: complete ones and deltas.
- :mod:`rlctl.weights.versions.pull` bringing a local copy to a published version.
- :mod:`rlctl.weights.versions.slime_layout` versions and deltas as slime's trainers publish them.
- :mod:`rlctl.weights.versions.manifest` what a published version says about itself.
- :mod:`rlctl.weights.checkpoint.atomic_write` writing so that a crash leaves the old or the new, nothing between.
- :mod:`rlctl.weights.shards.shard_map` the shard map: which slice of which full tensor lies where at a rank; the model
digest
  of a stage, whatever its layout.
- :mod:`rlctl.weights.tensor.slices` the arithmetic of slices behind it.
- :mod:`rlctl.weights.shards.rank_exchange` what the ranks of one stage exchange for that digest.
- :mod:`rlctl.weights.tensor.buckets` which tensors travel together, and how a packed bucket is laid out.
- :mod:`rlctl.weights.group.rendezvous` the store at which the members of a group meet, and how they form it.
- :mod:`rlctl.weights.group.process_group` the process group that a source and its receivers form.
- :mod:`rlctl.weights.group.tcp_connections` a group's connections: cut, so that a blocked collective ends; bounded, so
that
  what they queue stays cached.
- :mod:`rlctl.weights.tensor.source` what a trainer may hand over as "the weights", and what of it must travel together.
- :mod:`rlctl.weights.tensor.checkpoint_names` how a module's tensors and those of its checkpoint correspond (fused
experts, ties).
- :mod:`rlctl.weights.formats.block_fp8` the wire form of block-fp8 checkpoints, and a source that quantises to it.
- :mod:`rlctl.weights.shards.load_hooks` what an engine does around the tensors of an update.
- :mod:`rlctl.weights.tensor.placement` who shares memory with whom.
- :mod:`rlctl.weights.shared_memory.posix` POSIX shared memory that no crash leaks.
- :mod:`rlctl.weights.shared_memory.cuda_ipc` the same of a GPU, by CUDA's own handles.
- :mod:`rlctl.weights.shared_memory.segment` a shared segment as messages describe it.
- :mod:`rlctl.weights.shared_memory.pool` a sender's segments, and who may still read them.
- :mod:`rlctl.weights.shared_memory.sender` writing an update into segments.
- :mod:`rlctl.weights.shared_memory.reader` mapping them, and copying out of them into place.
- :mod:`rlctl.weights.group.sender` sending an update.
- :mod:`rlctl.weights.receiver` receiving it into the shard map.
"""
