"""Bytes between TCP and WebSocket, by Python's websockets, for lab/tests/websocket.rs.

relay.py serve HOST PORT [DIR]   a WebSocket server; each connection goes on to HOST:PORT
relay.py connect URI [DIR]       a TCP listener; each connection goes on to the WebSocket server

With certificates in DIR it is TLS at both ends. Prints the port that it listens on.
"""

import asyncio
import random
import ssl
import sys

from websockets.asyncio.client import connect
from websockets.asyncio.server import serve

# Pings in the middle of everything, and an end if one is not answered.
OPTIONS = {"max_size": None, "ping_interval": 0.05, "ping_timeout": 30}


async def bridge(websocket, reader, writer):
    async def to_tcp():
        async for message in websocket:
            assert isinstance(message, bytes), "text"
            writer.write(message)
            await writer.drain()
        writer.write_eof()

    async def to_websocket():
        while data := await reader.read(1 << 16):
            cut = random.randrange(len(data) + 1)
            # A message in two fragments.
            await websocket.send([data[:cut], data[cut:]])
        await websocket.close()

    try:
        await asyncio.gather(to_tcp(), to_websocket())
    finally:
        writer.close()


def context(purpose, role, directory):
    made = ssl.create_default_context(purpose, cafile=f"{directory}/ca-cert.pem")
    made.load_cert_chain(f"{directory}/{role}-cert.pem", f"{directory}/{role}-key.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


async def main():
    mode, *rest = sys.argv[1:]
    if mode == "serve":
        host, port, *directory = rest
        tls = context(ssl.Purpose.CLIENT_AUTH, "server", *directory) if directory else None

        async def handler(websocket):
            assert websocket.request.path == "/vm", websocket.request.path
            await bridge(websocket, *await asyncio.open_connection(host, int(port)))

        server = await serve(handler, "127.0.0.1", 0, ssl=tls, **OPTIONS)
    else:
        uri, *directory = rest
        tls = context(ssl.Purpose.SERVER_AUTH, "client", *directory) if directory else None

        async def accepted(reader, writer):
            async with connect(uri, ssl=tls, **OPTIONS) as websocket:
                await bridge(websocket, reader, writer)

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    print("listening", server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
