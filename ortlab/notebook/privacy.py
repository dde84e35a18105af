"""Exposure of a kernel's outputs to other users of the machine."""

from __future__ import annotations

from ipykernel.kernelapp import IPKernelApp

HOW = "--KernelManager.transport_encryption=auto"
"""Option of JupyterLab and Notebook that encrypts the messages of kernels with CurveZMQ.

Available since jupyter_client 8.9 and ipykernel 7.3; off by default.
"""


def exposure() -> str | None:
    """Return a one-line warning if other users can read this kernel's outputs, or None.

    Jupyter signs the messages between a kernel and its server but does not encrypt them. Anyone who
    can connect to the port of outputs (on loopback, any user of the machine) receives all of them
    (https://jupyter-client.readthedocs.io/en/stable/messaging.html).
    """
    if not IPKernelApp.initialized():
        return None
    app = IPKernelApp.instance()
    if app.transport != "tcp" or getattr(app, "curve_secretkey", None):
        return None
    where = "users of this machine" if app.ip in {"127.0.0.1", "localhost"} else "machines' users"
    return (
        f"other {where} can read what this kernel shows, as Jupyter's messages are not encrypted; "
        f"start Jupyter with {HOW}"
    )
