"""What `make slides` does first: says in one line what is missing, and installs marp-cli once.

Runs on the system's Python, before the lab is set up, so it imports nothing but the standard library. Left out:
installing node or a browser; that is the system's business.
"""

import json
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC_BROWSERS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
DEBIAN = {"node": "nodejs", "npm": "npm", "chromium": "chromium"}
DOES = "make slides draws the figures and builds slides/built/*.html and *.pdf"


def browser():
    """The path of a Chromium or Chrome: CHROME_PATH if that is set, else one that is found; "" for none."""
    told = os.environ.get("CHROME_PATH")
    if told:
        return shutil.which(told) or ""
    found = [shutil.which(name) for name in BROWSERS] + [path for path in MAC_BROWSERS if os.path.exists(path)]
    return next((path for path in found if path), "")


def missing():
    """Names of what is not here, out of node, npm and chromium. A node older than 18 counts as none."""
    here = {"node": node_is_new_enough(), "npm": bool(shutil.which("npm")), "chromium": bool(browser())}
    return [name for name in here if not here[name]]


def node_is_new_enough():
    """Whether `node` starts and is 18 or newer, as marp-cli asks."""
    if not shutil.which("node"):
        return False
    said = subprocess.run(["node", "--version"], stdout=subprocess.PIPE, text=True).stdout
    version = re.match(r"v(\d+)", said)
    return version is not None and int(version.group(1)) >= 18


def refusal():
    """One line that says what is missing and how to get it; "" when nothing is."""
    names = missing()
    if not names:
        return ""
    packages = " ".join(DEBIAN[name] for name in names)
    needs = ["node 18 or newer" if name == "node" else name for name in names]
    elsewhere = " (a browser elsewhere: CHROME_PATH=/path/to/it)" if "chromium" in names else ""
    return f"slides: not found: {', '.join(needs)}; Debian: apt install {packages}{elsewhere}. {DOES}."


def wanted(folder=HERE):
    """The version of marp-cli that package.json names."""
    with open(os.path.join(folder, "package.json"), encoding="utf-8") as file:
        return json.load(file)["devDependencies"]["@marp-team/marp-cli"]


def installed(folder=HERE):
    """The version of marp-cli in node_modules; "" for none."""
    try:
        with open(os.path.join(folder, "node_modules", "@marp-team", "marp-cli", "package.json")) as file:
            return json.load(file)["version"]
    except (OSError, ValueError, KeyError):
        return ""


def install(folder=HERE):
    """`npm ci`: exactly what package-lock.json names, into slides/node_modules. Returns npm's exit code."""
    print(f"slides: npm installs marp-cli {wanted(folder)} into slides/node_modules, some 140 MB, once", flush=True)
    environ = dict(os.environ, PUPPETEER_SKIP_DOWNLOAD="1")
    return subprocess.call(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, env=environ)


def main():
    """Returns the exit code."""
    told = refusal()
    if told:
        print(told, file=sys.stderr)
        return 1
    if installed() != wanted() and install() != 0:
        print("slides: npm ci failed in slides/, see above; it needs the npm registry", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
