#!/usr/bin/env python3
"""Records the golden vectors from stock QEMU; README.md says what each is.

    record.py QEMU-10.0 QEMU-7.2-TREE [NAME…]

Source and destination are both stock QEMU. They migrate through unix sockets of this program, which passes every byte on
and keeps a copy: of the main channel, of each lane, and of the return path. So a vector is a stream that QEMU has loaded.
"""
import json, os, shutil, socket, subprocess, sys, tempfile, threading, time, zlib

HERE = os.path.dirname(os.path.abspath(__file__))
UUID = "00112233-4455-6677-8899-aabbccddeeff"
FILLED_PAGES = 40
# A 64 KiB firmware: fills 40 pages, every second one from 64 KiB on, each with its segment's number; then counts forever
# in two places of each.
CODE = bytes.fromhex(
    "fa"  # cli
    "bb0010 ba2800"  # mov bx, 0x1000; mov dx, 40
    "8ec3 31ff b90008 89d8 fc f3ab"  # mov es, bx; xor di, di; mov cx, 2048; mov ax, bx; cld; rep stosw
    "81c30002 4a 75ed"  # add bx, 0x200; dec dx; jnz
    "bb0010 ba2800"  # mov bx, 0x1000; mov dx, 40
    "8ec3 26ff061000 268006000803"  # mov es, bx; inc word es:[0x10]; add byte es:[0x800], 3
    "81c30002 4a 75ec ebe4".replace(" ", "")  # add bx, 0x200; dec dx; jnz; jmp
)
RESET = bytes.fromhex("ea000000f0")  # jmp f000:0000


def firmware():
    image = bytearray(64 << 10)
    image[: len(CODE)] = CODE
    image[0xFFF0 : 0xFFF0 + len(RESET)] = RESET
    return bytes(image)


class Qemu:
    def __init__(self, place, name, program, environment, arguments):
        path = os.path.join(place, name + ".qmp")
        command = [*program, *arguments, "-qmp", f"unix:{path},server=on,wait=off"]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        self.socket = socket.socket(socket.AF_UNIX)
        wait(lambda: self.connect(path), "QMP of " + name)
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self("qmp_capabilities")

    def connect(self, path):
        try:
            self.socket.connect(path)
            return True
        except OSError:
            if self.process.poll() is not None:
                raise SystemExit("QEMU does not start")
            return False

    def __call__(self, command, **arguments):
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise SystemExit(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]

    def monitor(self, line):
        return self("human-monitor-command", **{"command-line": line})

    def end(self):
        self.process.kill()
        self.process.wait()


def wait(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come in {seconds} s")
        time.sleep(0.01)


class Proxy:
    """Passes connections on to the destination; the first is the main channel."""

    def __init__(self, listen, onward):
        self.recordings, self.returns, self.threads, self.onward = [], bytearray(), [], onward
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(listen)
        self.listener.listen(16)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(self.onward)
            recording, first = bytearray(), not self.recordings
            self.recordings.append(recording)
            back = self.returns if first else bytearray()
            for source, sink, copy in [(near, far, recording), (far, near, back)]:
                thread = threading.Thread(target=pump, args=(source, sink, copy), daemon=True)
                thread.start()
                self.threads.append(thread)

    def finish(self):
        for thread in self.threads:
            thread.join(20)


def pump(source, sink, copy):
    try:
        while data := source.recv(1 << 16):
            copy.extend(data)
            sink.sendall(data)
    except OSError:
        pass
    try:
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def capabilities(names):
    return [{"capability": name, "state": True} for name in names]


def record(name, qemu, machine, caps, parameters, extra=(), ticking=True, passes=0, file=False):
    place = tempfile.mkdtemp()
    program, environment = qemu
    with open(os.path.join(place, "firmware"), "wb") as out:
        out.write(firmware())
    arguments = ["-machine", machine, "-m", "2", "-nodefaults", "-vga", "none", "-display", "none", "-accel", "tcg"]
    arguments += ["-bios", os.path.join(place, "firmware"), *extra, "-S"]
    running = []
    try:
        source = Qemu(place, "source", program, environment, arguments)
        running.append(source)
        source("migrate-set-capabilities", capabilities=capabilities(caps))
        source("migrate-set-parameters", **parameters)
        source("cont")
        last = 0x10000 + (FILLED_PAGES - 1) * 0x2000 + 4094
        wait(lambda: source.monitor(f"xp /1hx {last:#x}").split()[-1] != "0x0000", "the filled memory")
        if not ticking:
            source("stop")
        if file:
            stored = os.path.join(place, "stored")
            source("migrate", uri="file:" + stored)
            wait(lambda: status(source) == "completed", "the stored guest")
            with open(stored, "rb") as content:
                parts = {"file": content.read()}
        else:
            inward, onward = os.path.join(place, "in"), os.path.join(place, "on")
            destination = Qemu(place, "destination", program, environment, [*arguments, "-incoming", "defer"])
            running.append(destination)
            destination("migrate-set-capabilities", capabilities=capabilities(caps))
            lanes = {key: parameters[key] for key in parameters if key == "multifd-channels"}
            if lanes:
                destination("migrate-set-parameters", **lanes)
            destination("migrate-incoming", uri="unix:" + onward)
            proxy = Proxy(inward, onward)
            source("migrate", uri="unix:" + inward)
            if passes:
                wait(lambda: source("query-migrate").get("ram", {}).get("dirty-sync-count", 0) >= passes, "passes")
                source("migrate-set-parameters", **{"downtime-limit": 20000, "max-bandwidth": 1 << 30})
            wait(lambda: status(source) == "completed", "the end")
            wait(lambda: destination("query-status")["status"] != "inmigrate", "the guest at the destination")
            proxy.finish()
            parts = {"main": bytes(proxy.recordings[0])}
            if proxy.returns:
                parts["return"] = bytes(proxy.returns)
            for lane in proxy.recordings[1:]:
                parts[f"lane{lane[24]}"] = bytes(lane)
    finally:
        for process in running:
            process.end()
        shutil.rmtree(place)
    for part, data in parts.items():
        packed = zlib.compress(data, 9)
        with open(os.path.join(HERE, f"{name}.{part}.z"), "wb") as out:
            out.write(packed)
        print(f"{name}.{part}: {len(data)} bytes, {len(packed)} packed")


def status(qemu):
    answer = qemu("query-migrate")
    if answer.get("status") == "failed":
        raise SystemExit(f"migration failed: {answer}")
    return answer.get("status")


def main():
    new, tree = sys.argv[1], sys.argv[2]
    wanted = sys.argv[3:]
    libraries = ":".join(os.path.join(tree, place, "x86_64-linux-gnu") for place in ["usr/lib", "lib"])
    old_environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    data = [arg for place in ["qemu", "seabios"] for arg in ("-L", os.path.join(tree, "usr/share", place))]
    new = ([new], None)
    old = ([os.path.join(tree, "usr/bin/qemu-system-x86_64"), *data], old_environment)
    slow = {"max-bandwidth": 1 << 20, "downtime-limit": 1}
    lanes = {"multifd-channels": 2}
    net = ["-device", "virtio-net-pci,romfile="]
    soon = {"max-bandwidth": 1 << 20, "downtime-limit": 2000}
    uuid = ["-uuid", UUID]
    slower = {"max-bandwidth": 128 << 10, "downtime-limit": 1}
    plans = {
        "precopy-10.0": (new, "pc-q35-10.0", ["return-path", "switchover-ack"], slow, net, True, 3),
        "xbzrle-10.0": (new, "pc-q35-10.0", ["return-path", "xbzrle"], slower, [], True, 6),
        "multifd-10.0": (new, "pc-q35-10.0", ["return-path", "multifd", "validate-uuid"], slow | lanes, uuid, True, 4),
        "multifd-10.0-as-7.2": (new, "pc-q35-7.2", ["return-path", "multifd"], soon | lanes, [], True, 0),
        "precopy-7.2": (old, "pc-q35-7.2", ["return-path"], soon, [], True, 0),
        "multifd-7.2": (old, "pc-q35-7.2", ["return-path", "multifd"], slow | lanes, [], True, 4),
        "mapped-10.0": (new, "pc-q35-10.0", ["mapped-ram"], {}, [], False, 0, True),
        "mapped-multifd-10.0": (new, "pc-q35-10.0", ["mapped-ram", "multifd"], lanes, [], False, 0, True),
    }
    for name, plan in plans.items():
        if not wanted or name in wanted:
            record(name, *plan)


main()
