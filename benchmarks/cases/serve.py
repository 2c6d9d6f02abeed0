"""JPEG in, vector out, over HTTP on one GPU: `encoder-cg serve` beside a plain Starlette server.

    python benchmarks/bench.py serve --output out/serve.json

SigLIP SO400M/14-384 (its pooled vector) and Qwen3-VL-8B's tower (the mean of its rows), seeded weights, bf16.
The plain server is what one writes first: uvicorn, a thread pool that decodes, and a lock around one request
at a time through the tower of transformers after `torch.compile`. Both run in a process of their own and
answer base64.

Each server's capacity is measured with many connections that send one request after another. Then requests
come at random times, at 10 to 90 % of the capacity of `encoder-cg serve`, from new arrivals whatever is still
waiting; milliseconds from the arrival to the answer. A rate that is more than a server's capacity is left out
for it. `--tiny` takes tiny towers, on a CPU too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SERVERS = ("encoder-cg serve", "Starlette, torch.compile")
MODELS = {"siglip-so400m-384": 384, "qwen3-vl-8b": 448}
"""A published model's tower, and the side of the pictures."""
SHARES = tuple(share / 10 for share in range(1, 10))
CLIENTS, HOST, PATH = 64, "127.0.0.1", "/v1/embeddings?encoding_format=base64"
_TINY_BLOCKS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate, and for the capacity")
    parser.add_argument("--tiny", action="store_true", help="towers of one block, a CPU, and two rates")


def run(arguments: argparse.Namespace) -> Any:
    from models import make_checkpoint, photographs
    from storage import new_result, store

    tiny: bool = arguments.tiny
    if not tiny and not torch.cuda.is_available():
        raise SystemExit("serve: needs a CUDA device, or --tiny")
    seconds = 1.0 if tiny else arguments.seconds
    shares = SHARES[4::4] if tiny else SHARES
    result = new_result("serve", seconds=seconds, clients=CLIENTS, sides=MODELS, tiny=tiny)
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models:
            directory = make_checkpoint(Path(temporary) / model, model, blocks=_TINY_BLOCKS if tiny else None)
            images = photographs((MODELS[model],) * 2)
            capacity: float | None = None
            for server in SERVERS:
                with Server(server, directory, tiny) as running:
                    own = asyncio.run(measure_capacity(running.port, images, seconds, 4 if tiny else CLIENTS))
                    capacity = capacity or own
                    row = {"model": model, "server": server}
                    result["rows"].append({**row, "share": 1.0, "images/s": own})
                    for share in shares:
                        if (rate := share * capacity) < own:
                            found = asyncio.run(measure_rate(running.port, images, rate, seconds))
                            result["rows"].append({**row, "share": share, **found})
                store(arguments.output, result)
    return result


class Server:
    """A server in a process of its own, ready to answer."""

    def __init__(self, name: str, directory: Path, tiny: bool) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port: int = probe.getsockname()[1]
        if name == SERVERS[0]:
            command = ["-m", "fxsplit_encoder.cli.main", "serve", str(directory), "--port", str(self.port)]
            if tiny:  # nothing is compiled
                settings = directory / "settings.yaml"
                settings.write_text("config:\n  enabled: false\n", encoding="utf-8")
                command += ["--settings", str(settings)]
        else:
            command = ["-c", f"from cases.serve import plain; plain({str(directory)!r}, {self.port})"]
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen([sys.executable, *command], env=environment)

    def __enter__(self) -> Server:
        while not _answers(self.port):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=5) as connection:
            connection.sendall(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


# --- load


class Connection:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, image: bytes) -> None:
        """One image; returns with its vector."""
        if self._streams is None or self._streams[0].at_eof():  # the server closes those that are idle
            self._streams = await asyncio.open_connection(HOST, self._port, limit=1 << 24)
        reader, writer = self._streams
        fields = f"host: x\r\ncontent-type: image/jpeg\r\ncontent-length: {len(image)}"
        writer.write(f"POST {PATH} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + image)
        answer = await reader.readuntil(b"\r\n\r\n")
        lines = answer.decode("latin-1").lower().split("\r\n")
        size = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        body = await reader.readexactly(size)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{lines[0]}: {body[:300].decode()}")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def measure_capacity(port: int, images: Sequence[bytes], seconds: float, clients: int) -> float:
    """Images a second that many connections get, after as long a time to warm up."""
    connections = [Connection(port) for _ in range(clients)]

    async def send(connection: Connection, until: float) -> int:
        count = 0
        for image in itertools.cycle(images):
            await connection.post(image)
            count += 1
            if time.perf_counter() >= until:
                break
        return count

    rates = []
    for _ in range(2):
        begin = time.perf_counter()
        counts = await asyncio.gather(*(send(each, begin + seconds) for each in connections))
        rates.append(sum(counts) / (time.perf_counter() - begin))
    for connection in connections:
        connection.close()
    return rates[-1]


async def measure_rate(port: int, images: Sequence[bytes], rate: float, seconds: float) -> dict[str, Any]:
    """Latency where requests come at random times, the same for the same rate."""
    draw, idle, times = random.Random(0), [Connection(port)], []
    start = time.perf_counter()

    async def arrive(at: float, image: bytes) -> None:
        await asyncio.sleep(start + at - time.perf_counter())
        connection = idle.pop() if idle else Connection(port)
        await connection.post(image)
        times.append(1e3 * (time.perf_counter() - start - at))
        idle.append(connection)

    at, arrivals = 0.0, []
    for image in itertools.cycle(images):
        at += draw.expovariate(rate)
        if at > seconds and arrivals:
            break
        arrivals.append(arrive(at, image))
    await asyncio.gather(*arrivals)
    for connection in idle:
        connection.close()
    times.sort()
    p50, p99 = (times[math.ceil(part * len(times)) - 1] for part in (0.5, 0.99))
    return {"rate": rate, "p50": p50, "p99": p99, "requests": len(times)}


# --- the plain server


def plain(directory: str, port: int) -> None:
    """Serve a checkpoint in the plain way."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from fxsplit_encoder.media import MediaSettings, load_image
    from fxsplit_encoder.models.checkpoint import Checkpoint
    from fxsplit_encoder.models.load import load_tower, read_family

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checkpoint = Checkpoint.locate(directory)
    family, settings = read_family(checkpoint)
    own = family.pooled or family
    preparation = family.prepare(settings, checkpoint.processors())
    tower = load_tower(checkpoint, dtype, device, own)
    if device.type == "cuda":
        tower.compile()
    lock = threading.Lock()

    @torch.inference_mode()
    def encode(body: bytes) -> bytes:
        tensors = preparation.image(load_image(body, MediaSettings())).tensors
        inputs = {k: v.to(device, dtype) if v.is_floating_point() else v for k, v in tensors.items()}
        with lock:
            rows = own.eager(tower, inputs)
            vector = torch.nn.functional.normalize(rows.float().mean(dim=0), dim=0).cpu()
        text = base64.b64encode(vector.numpy().tobytes()).decode()
        return json.dumps({"data": [{"index": 0, "embedding": text}]}).encode()

    async def embed(request: Request) -> Response:
        body = await request.body()
        return Response(await run_in_threadpool(encode, body), media_type="application/json")

    async def ready(request: Request) -> Response:
        return Response()

    routes = [Route("/v1/embeddings", embed, methods=["POST"]), Route("/ready", ready)]
    uvicorn.run(Starlette(routes=routes), host=HOST, port=port, log_level="warning", access_log=False)
