"""TensorRT-LLM: a build kind and an external engine.

The only package that imports ``tensorrt_llm``, and only when an engine is loaded: importing this package
needs nothing beyond the base install. Not run on a GPU; ``docs/tensorrt-llm.md`` says what is known and from where.
"""
