"""Runs kmock's Kubernetes emulator on a port, and ends when its standard input does.

    kmock_server.py PORT
    kmock_server.py PORT CERTIFICATE KEY    behind TLS: a second port is opened, whose bytes go to the first
"""

import asyncio
import ssl
import sys

import kmock


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    writer.close()


async def main(port: int, certificate: list[str]) -> None:
    plain = port + 1 if certificate else port

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", plain)
        await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))

    emulator = kmock.KubernetesEmulator()
    async with emulator, kmock.Server(emulator, host="127.0.0.1", port=plain):
        emulator.resources["v1/pods"].namespaced = True
        if certificate:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*certificate)
            await asyncio.start_server(forward, "127.0.0.1", port, ssl=context)
        print("listening", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
