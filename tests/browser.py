"""A headless Chromium for tests, driven by JSON messages over its debugging pipe.

The protocol: https://chromedevtools.github.io/devtools-protocol
"""
import json
import os
import select
import shutil
import signal
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SWITCHES = ["--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--hide-scrollbars", "--disable-dev-shm-usage"]
KEYS = {"Enter": 13, "End": 35, "ArrowRight": 39}      # their codes
SECONDS = 60                                           # the most that a reply may take


class Browser:
    """One page. `send` calls a method of the protocol; `events` holds what the page reported."""

    def __init__(self, folder):
        """folder: where the browser keeps its profile."""
        read, self.out = os.pipe()
        self.inn, write = os.pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        # Chromium reads from descriptor 3 and writes to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", 'exec "${@:3}" 3<&"$1" 4>&"$2"', "bash", str(read), str(write),
             CHROMIUM, *SWITCHES, *sandbox, f"--user-data-dir={folder}"], pass_fds=(read, write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(read)
        os.close(write)
        self.buffer, self.events, self.last, self.session = b"", [], 0, None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        """Call a method and wait for its result."""
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self.receive()
            if found.get("id") == self.last:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self.events.append(found)

    def receive(self):
        """The next message from the browser."""
        end = time.monotonic() + SECONDS
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.inn], [], [], max(end - time.monotonic(), 0))
            part = os.read(self.inn, 2**16) if ready else b""
            assert part, "the browser does not answer, or has ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, path):
        """Load a file and wait until it is complete."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.receive())

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True,
                          awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def look(self, width, height):
        """Set the window's size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)

    def click(self, selector):
        """Scroll to an element, move the mouse to its middle, and click."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key, text=""):
        """Press one of KEYS. text: what the key types."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text,
                      windowsVirtualKeyCode=KEYS[key])

    def type(self, text):
        """Type a text, letter by letter, where the focus is."""
        for letter in text:
            self.send("Input.insertText", text=letter)

    def close(self):
        """End the browser and the processes it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.out)
        os.close(self.inn)
