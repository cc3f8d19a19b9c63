"""SmolLM2-135M on kvpool: a whole model in array code, served with continuous batching.

Run it with ``python -m examples.smollm2``. The model knows its KV cache only through kvpool's
public names, so the files here are also the shortest answer to "how do I use the pool?":

- ``weights``, ``tokenizer``: what the GGUF file holds;
- ``model``: the forward pass, written against an array namespace;
- ``reference``: the same mathematics in float64 without any cache, to test against;
- ``sampling``, ``generation``, ``serving``: from logits to answers, many requests at once;
- ``drafting``, ``windows``: guessed tokens, and the pass that verifies them;
- ``workload``, ``demo``: chat requests from a file, and what the program prints.
"""
