"""Two nodes of two ranks each, in network namespaces of their own that a virtual cable joins. Linux, as root.

    python tests/two_nodes.py

Three runs of the README's two-node command (gloo, CPU): one process alone; two nodes, undisturbed; two nodes
of which one is killed (SIGKILL, launcher and ranks) in mid-run, and the same command given again on both. The
losses of the second and the third must be equal, and the first's equal to 1e-4."""

# ruff: noqa: E402
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import losses

NODES = {"node0": "10.99.7.1", "node1": "10.99.7.2"}
ARGS = ["--preset", "shakespeare", "--n-layer", "2", "--n-embd", "32", "--total-batch-size", "512",
        "--seq-len", "32", "--micro-batch-size", "2", "--max-steps", "40", "--eval-every", "10",
        "--eval-tokens", "2048", "--sample-every", "0", "--save-every", "10", "--device", "cpu", "--resume"]

def join_nodes(folder: Path) -> None:
    """Makes both namespaces and the cable; each node knows both names by its own /etc/hosts."""
    subprocess.run(["ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1"], check=True)
    for i, (node, address) in enumerate(NODES.items()):
        for command in (f"ip netns add {node}", f"ip link set cable{i} netns {node}",
                        f"ip -n {node} address add {address}/24 dev cable{i}",
                        f"ip -n {node} link set cable{i} up", f"ip -n {node} link set lo up"):
            subprocess.run(command.split(), check=True)
    hosts = "".join(f"{ip} {name}\n" for name, ip in NODES.items())
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)

def start(node: str, folder: Path, log_dir: Path) -> subprocess.Popen:
    """The two-node command, on one node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2",
                "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500", str(ROOT / "train_gpt2.py")]
    command = " ".join([*torchrun, *ARGS, "--log-dir", str(log_dir)])
    inside = f"hostname {node} && mount --bind {folder}/hosts /etc/hosts && OMP_NUM_THREADS=1 exec {command}"
    in_node = ["ip", "netns", "exec", node, "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
    command = [*in_node, "bash", "-c", inside]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

def finish(processes: list[subprocess.Popen]) -> None:
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output

def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            join_nodes(folder)
            command = [sys.executable, ROOT / "train_gpt2.py", *ARGS, "--log-dir", folder / "alone"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            finish([start(node, folder, folder / "straight") for node in NODES])
            first, second = (start(node, folder, folder / "killed") for node in NODES)
            for line in first.stdout:
                if "step    24" in line:
                    break
            second.send_signal(signal.SIGKILL)  # and with its process namespace all that it started
            killed = time.perf_counter()
            first.communicate()
            assert first.returncode != 0, "the first node did not notice"
            noticed = time.perf_counter() - killed
            finish([start(node, folder, folder / "killed") for node in NODES])
        finally:
            for node in NODES:
                subprocess.run(["ip", "netns", "delete", node])
        alone, straight, broken = (losses(folder / run) for run in ("alone", "straight", "killed"))
        assert len(alone) == 40 and straight == broken, "restarted and undisturbed losses differ"
        assert losses(folder / "straight", "val") == losses(folder / "killed", "val")
        difference = max(abs(a - b) for a, b in zip(alone, straight, strict=True))
        assert difference < 1e-4, difference
    print(f"two nodes against one process: largest difference of 40 losses {difference:.1e}; one node killed "
          f"at step 24 (the other gave up after {noticed:.1f} s) and both restarted: the same losses")

if __name__ == "__main__":
    main()
