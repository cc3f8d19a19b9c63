"""A decoder in plain torch that keeps its K and V in a pool.

``python -m examples.torch_attention`` runs it, with ``--device cuda`` on a GPU. The model calls
``attend(layer, q, k, v)`` and knows nothing of caches. `model.py` is the model, `caches.py` has
three such functions, and `run.py` compares them on requests that are prefilled, decoded, and
bound again over a cached prefix.

How tensors and pool share memory
---------------------------------
No tensor is copied on its way to the pool, and no array of the pool on its way to torch.

- **torch to pool.** `Step.put` and `PagedAttention.run` take tensors on the pool's device as they
  are, bfloat16 too, and read them where they lie. A tensor `q` gives a tensor back.
- **pool to torch.** ``kvpool.interop.torch.pool_tensors(pool)`` has tensors over the pool's own K
  and V: ``key_layer(layer)`` is ``[num_slots, num_kv_heads, head_dim]`` in the storage dtype. What
  one side writes, the other sees. Slots and page tables cross by `tensor_of`, from the same
  module.
- **Who owns the memory.** The pool allocates K and V, once, and a tensor over them is a view. It
  keeps the memory alive after ``pool.close()``: drop the tensors, or the memory is not given back.
  A page belongs to the request that is bound to it: after `finish_request` a view of its slots
  shows what the next owner writes.
- **Who writes.** `put` knows what it wrote, and only written tokens are ever cached. Code that
  writes through the tensors says so with ``pool.mark_written(request_id, length)``.
- **Streams.** On a GPU the pool works on CuPy's current stream and torch on its own.
  `on_torch_stream` makes them one, so that nothing has to wait; docs/gpu.md has the rules.
"""
