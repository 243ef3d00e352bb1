"""A browser without a window, driven over its own protocol: pages, keys, pictures, requests."""

import base64
import json
import os
import subprocess
from contextlib import contextmanager


class Tab:
    """One open page. ``console`` has errors and warnings, ``requests`` each address asked for."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._unread, self._number, self._session = b"", 0, ""
        self.console = []
        self.requests = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "result" in answer, (method, answer)
        return answer["result"]

    def _next(self):
        """Return the browser's next message; record errors and requests of the page."""
        while b"\0" not in self._unread:
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(line)
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded":
                self.console.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console.append(json.dumps(params["args"]))
        return message

    def resize(self, width, height):
        """Give the page's window a size; one of less than 500 pixels is a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 500, **size)

    def prefer(self, scheme):
        """Prefer the "light" or the "dark" scheme."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, address):
        """Open a page and wait until all of it is loaded."""
        self.call("Page.navigate", url=address)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script):
        """Run a script in the page and return its value; a promise is waited for."""
        told = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def press(self, key, code, number):
        """Press a key, which the protocol knows by three names."""
        text = {"text": key} if len(key) == 1 else {}
        of = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **of, **text)

    def press_tab(self):
        """Press the tab key."""
        self.press("Tab", "Tab", 9)

    def picture(self, path):
        """Write what the window shows as a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def open_browser(program, profile):
    """Start a browser with one open page; end it on leaving."""
    to_browser, write_end = os.pipe()
    read_end, from_browser = os.pipe()
    # The protocol's pipes are the browser's files 3 and 4.
    command = [
        *("bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", program),
        *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
        *("--no-first-run", "--disable-extensions", f"--user-data-dir={profile}"),
    ]
    running = subprocess.Popen(
        command, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(write_end, read_end)
    finally:
        running.terminate()
        running.wait(30)
        os.close(write_end)
        os.close(read_end)
