"""JPEG in, vector out, over HTTP on one GPU: `encoder-cg serve` beside a plain server and vLLM's.

    python benchmarks/bench.py serve --output out/serve.json

SigLIP SO400M/14-384 (its pooled vector) and Qwen3-VL-8B's tower (the mean of its rows), seeded weights, bf16.
The plain server is what one writes first: uvicorn, threads that decode, and a lock around one request at a
time through transformers' tower after `torch.compile`. vLLM's pooling runner, caches off, takes SigLIP whole.
Capacity is that of many connections; then requests come at random times, at 10 to 90 % of the capacity of
`encoder-cg serve`: milliseconds from the arrival to the answer, none where that is more than a server's own.
With `--on-device` its GPU prepares images from that step on; what one core and the GPU prepare is timed too.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import importlib
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from storage import ROOT, Record, Row, environment
from timing import percentile
from torch.utils.benchmark import Timer

SERVERS = OURS, PLAIN, VLLM = ("encoder-cg serve", "Starlette, torch.compile", "vLLM, pooling runner")
MODELS = {"siglip-so400m-384": 384, "qwen3-vl-8b": 448}
"""A published model's tower, and the side of the pictures."""
STEPS = ("normalize", "resize", "decode")
SHARES = tuple(share / 10 for share in range(1, 10))
CLIENTS, HOST = 64, "127.0.0.1"
_START_S = 600.0
_TINY_BLOCKS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--on-device", nargs="+", choices=STEPS, default=[], help="first steps of the GPU")
    parser.add_argument("--seconds", type=float, default=3.0, help="to warm up, and as long for the capacity")
    parser.add_argument("--requests", type=int, default=200, help="at each rate")


def run(arguments: argparse.Namespace, record: Record) -> None:
    from models import photographs

    tiny: bool = arguments.tiny
    seconds, requests = (0.2, 3) if tiny else (arguments.seconds, arguments.requests)
    record.settings.update(seconds=seconds, requests=requests, clients=CLIENTS, sides=MODELS, tiny=tiny)
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models:
            directory = make_model(Path(temporary) / model, model, tiny)
            images = photographs((MODELS[model],) * 2)
            capacity: float | None = None
            for server in arguments.servers:
                rows = measure(Server(server, model, directory, tiny), images, capacity, seconds, requests)
                capacity = capacity or rows[0].get("images/s")
                for row in rows:
                    record({"model": model, "server": server, **row})
            for step in arguments.on_device:
                rates = measure_preparation(directory, step, images, seconds)
                server = Server(OURS, model, directory, tiny, step)
                for row in measure(server, images, None, seconds, requests):
                    record({"model": model, "server": f"{OURS}, {step}", **rates, **row})


def measure(
    server: Server, images: Sequence[bytes], capacity: float | None, seconds: float, requests: int
) -> list[Row]:
    """The capacity of a server, and latencies at shares of a capacity, its own where None is given; or the
    reason why there are none."""
    bodies = [server.body(image) for image in images]
    gc.collect()
    gc.freeze()  # else the client stops for a third of a second in the middle of a rate
    try:
        with server:
            clients = 4 if server.tiny else CLIENTS
            own = asyncio.run(measure_capacity(server, bodies, seconds, clients))
            rows: list[Row] = [{"share": 1.0, "images/s": own}]
            for share in SHARES[4::4] if server.tiny else SHARES:
                if (rate := share * (capacity or own)) < own:
                    found = asyncio.run(measure_rate(server, bodies, rate, requests))
                    rows.append({"share": share, **found})
            return rows
    except Unavailable as error:
        return [{"share": 1.0, "reason": str(error)}]


def measure_preparation(directory: Path, step: Any, images: Sequence[bytes], seconds: float) -> Row:
    """Images a second of which one core does the host's part, and of which the device does the rest."""
    from fxsplit_encoder.models.load import device_of, dtype_of
    from fxsplit_encoder.service.encoder import PreparedImage, Preparer, upload
    from fxsplit_encoder.service.settings import ImageEncoderSettings
    from fxsplit_encoder.towers.inputs import PixelValues

    preparer, device = Preparer(ImageEncoderSettings(model=str(directory), on_device=step)), device_of("auto")
    table = preparer.values
    values = None if table is None else PixelValues(table, dtype_of("auto", device), device)

    def load() -> list[PreparedImage]:
        return [preparer.load(image) for image in images]

    def images_a_second(work: Callable[[], Any]) -> float:
        work()
        timer = Timer("work()", globals={"work": work})  # on one thread, to the end of the device's work
        return len(images) / timer.blocked_autorange(min_run_time=seconds).median

    batch = load()
    sent = images_a_second(lambda: upload(batch, values, device, preparer.steps.on_host))
    return {"one core/s": images_a_second(load), "device/s": sent}


class Unavailable(Exception):
    """A server that cannot take part, or refuses a request."""


def make_model(directory: Path, model: str, tiny: bool) -> Path:
    """A checkpoint of a tower; of SigLIP a whole one, which vLLM asks for, with a small text tower."""
    from models import make_checkpoint
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, SiglipConfig, SiglipModel

    from fxsplit_encoder.models.random import draw_weights
    from fxsplit_encoder.models.registry import architecture

    blocks = _TINY_BLOCKS if tiny else None
    if model != "siglip-so400m-384":
        return make_checkpoint(directory, model, blocks=blocks)
    vision = architecture(model).settings(blocks)["vision_config"]
    width = vision["hidden_size"]
    text = {"vocab_size": 8, "num_hidden_layers": 1, "intermediate_size": width, "pad_token_id": 1}
    text |= {"hidden_size": width, "num_attention_heads": vision["num_attention_heads"]}
    text |= {"bos_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 1024, "projection_size": width}
    whole = SiglipModel(SiglipConfig(vision_config=vision, text_config=text))
    draw_weights(whole, 0)
    whole.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(directory)
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1, "<s>": 2, "a": 3}, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(directory)
    processor = {"image_processor_type": "SiglipImageProcessor", "processor_class": "SiglipProcessor"}
    processor |= {"size": dict.fromkeys(("height", "width"), MODELS[model])}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return directory


class Server:
    """A server in a process of its own, ready to answer.

    Args:
        name: of `SERVERS`.
        model: of `MODELS`.
        directory: its checkpoint.
        tiny: nothing is compiled.
        step: of `STEPS`, the first that the GPU does.

    Raises:
        Unavailable: when it is entered, it cannot be started, or ends before it is ready.
    """

    def __init__(self, name: str, model: str, directory: Path, tiny: bool, step: str = "normalize") -> None:
        self.name, self.model, self.tiny, self._step = name, model, tiny, step
        self._directory = directory
        self._path = "/v1/embeddings" + ("" if name == VLLM else "?encoding_format=base64")
        self.port = 0

    def body(self, image: bytes) -> bytes:
        """The request for the vector of a JPEG file, after its first line."""
        kind, data = "image/jpeg", image
        if self.name == VLLM:
            url = "data:image/jpeg;base64," + base64.b64encode(image).decode()
            content = [{"type": "image_url", "image_url": {"url": url}}]
            message = {"messages": [{"role": "user", "content": content}], "encoding_format": "base64"}
            kind, data = "application/json", json.dumps({"model": str(self._directory), **message}).encode()
        fields = f"host: x\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}"
        return f"POST {self._path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data

    def __enter__(self) -> Server:
        command = self._command()
        self._process = subprocess.Popen([sys.executable, *command], env=environment(ROOT / "benchmarks"))
        end = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise Unavailable(f"it ended with {self._process.returncode} before it was ready")
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _command(self) -> list[str]:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        directory, port = str(self._directory), str(self.port)
        if self.name == PLAIN:
            return ["-c", f"from cases.serve import plain; plain({directory!r}, {port})"]
        if self.name == OURS:
            settings = self._directory / "settings.yaml"
            tiny = "config:\n  enabled: false\n" if self.tiny else ""
            settings.write_text(f"on_device: {self._step}\n{tiny}", encoding="utf-8")
            command = ["-m", "fxsplit_encoder.cli.main", "serve", directory, "--port", port]
            return [*command, "--settings", str(settings)]
        if not self.model.startswith("siglip"):
            raise Unavailable("it pools what the language model makes of an image, not what its tower does")
        try:
            importlib.import_module("vllm.entrypoints.cli.main")
        except ImportError as error:
            raise Unavailable(f"vLLM cannot be imported: {error}") from error
        options = ["--runner", "pooling", "--host", HOST, "--port", port, "--no-enable-prefix-caching"]
        options += ["--mm-processor-cache-gb", "0", "--chat-template", "{{ messages[0]['content'] }}"]
        return ["-m", "vllm.entrypoints.cli.main", "serve", directory, *options]

    def _answers(self) -> bool:
        path = b"/health" if self.name == VLLM else b"/ready"
        try:
            with socket.create_connection((HOST, self.port), timeout=5) as connection:
                connection.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            return False


# --- load


class Connection:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, body: bytes) -> None:
        """Send a request; returns with its answer."""
        if self._streams is None or self._streams[0].at_eof():  # the server closes those that are idle
            self._streams = await asyncio.open_connection(HOST, self._port, limit=1 << 24)
        reader, writer = self._streams
        writer.write(body)
        answer = await reader.readuntil(b"\r\n\r\n")
        lines = answer.decode("latin-1").lower().split("\r\n")
        size = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        body = await reader.readexactly(size)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise Unavailable(f"{lines[0]}: {body[:300].decode()}")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def measure_capacity(server: Server, bodies: Sequence[bytes], seconds: float, clients: int) -> float:
    """Images a second that many connections get, after as long a time to warm up."""
    connections = [Connection(server.port) for _ in range(clients)]

    async def send(connection: Connection, until: float) -> int:
        count = 0
        for body in itertools.cycle(bodies):
            await connection.post(body)
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


async def measure_rate(server: Server, bodies: Sequence[bytes], rate: float, count: int) -> Row:
    """Latency where requests come at random times, the same for the same rate."""
    draw, idle, times = random.Random(0), [Connection(server.port)], []
    start = time.perf_counter()

    async def arrive(at: float, body: bytes) -> None:
        await asyncio.sleep(start + at - time.perf_counter())
        connection = idle.pop() if idle else Connection(server.port)
        await connection.post(body)
        times.append(1e3 * (time.perf_counter() - start - at))
        idle.append(connection)

    arrivals = itertools.accumulate(draw.expovariate(rate) for _ in range(count))
    await asyncio.gather(*map(arrive, arrivals, itertools.cycle(bodies)))
    for connection in idle:
        connection.close()
    p50, p99 = (percentile(times, part) for part in (0.5, 0.99))
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
    eager = own.eager_tower(tower)
    if device.type == "cuda":
        tower.compile()
    lock = threading.Lock()

    @torch.inference_mode()
    def encode(body: bytes) -> bytes:
        tensors = preparation.image(load_image(body, MediaSettings())).tensors
        inputs = {k: v.to(device, dtype) if v.is_floating_point() else v for k, v in tensors.items()}
        with lock:
            (rows,) = eager(inputs)
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
