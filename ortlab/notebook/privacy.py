"""Who on this machine may read what a kernel tells Jupyter."""

from __future__ import annotations

from ipykernel.kernelapp import IPKernelApp

HOW = "--KernelManager.transport_encryption=auto"
"""The option of JupyterLab and Notebook that has them talk to kernels by CurveZMQ.

From jupyter_client 8.9 and ipykernel 7.3 on, and off unless it is asked for.
"""


def exposure() -> str | None:
    """In a line, that other users can read this kernel's outputs; None where they cannot.

    Jupyter signs what goes between a kernel and its server, and does not encrypt it: whoever may
    connect to the port of outputs, on loopback any user of the machine, receives all of them
    (https://jupyter-client.readthedocs.io/en/stable/messaging.html).
    """
    if not IPKernelApp.initialized():
        return None
    app = IPKernelApp.instance()
    if app.transport != "tcp" or getattr(app, "curve_secretkey", None):
        return None
    where = "users of this machine" if app.ip in {"127.0.0.1", "localhost"} else "who reaches it"
    return (
        f"other {where} can read what this kernel shows, Jupyter's messages are not encrypted: "
        f"start it with {HOW}"
    )
