"""A server of batches around an engine without a model: `live_server.py STATE PORT`.

It draws ten pictures a second, each with the page of the run.
"""

import socket
import sys
from dataclasses import replace
from pathlib import Path

from fake_service import CONFIG, FakeService

from hyimg_cli.serve.app import HttpServer, Server
from hyimg_cli.serve.keys import Keys
from hyimg_cli.settings.config import settle


def main() -> None:
    state, port = Path(sys.argv[1]), int(sys.argv[2])
    service = FakeService()
    service.pace_s = 0.1
    config = replace(CONFIG, output=replace(CONFIG.output, folder=state, report=True))
    server = Server(service, settle({}, {}, {}), config, state, Keys({}))
    with socket.create_server(("127.0.0.1", port)) as listener:
        HttpServer(server).run(sockets=[listener])


if __name__ == "__main__":
    main()
