"""The guests of this package, or how to get them."""

try:
    import msgspec
    import zmq
    import zmq.utils.monitor
except ImportError as error:
    raise ImportError(
        f"events need pyzmq and msgspec, which cannot be imported ({error}): pip install "
        "'kvpool[events]'"
    ) from error

__all__ = ["msgspec", "zmq"]
