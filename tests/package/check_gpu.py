"""scripts/check-gpu on the simulated GPU: all the same for the archive as it is, and a program whose
output differs is found."""
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile


def check_gpu(script, archive):
    return subprocess.run([script, "--sim", archive], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=280)


def main(cpack, config, script):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        subprocess.run([cpack, "--config", config, "-D", f"CPACK_OUTPUT_FILE_PREFIX={scratch}"],
                       cwd=scratch, stdout=subprocess.DEVNULL, check=True)
        archive, = scratch.glob("*.tar.gz")
        good = check_gpu(script, archive)
        print(good.stdout)
        assert good.returncode == 0, good
        assert len(re.findall(r"^\w.* ms +same +\d+\.\d\d", good.stdout, re.M)) >= 12, good.stdout
        assert re.search(r"^cuMemGetInfo .*\d+\.\d\d  native$", good.stdout, re.M), good.stdout

        with tarfile.open(archive) as tar:
            tar.extractall(scratch / "changed")
        root, = (scratch / "changed").iterdir()
        for sample in (root / "samples/static").iterdir():
            sample.unlink()
        liar = root / "samples/static/liar"
        liar.write_text("#!/bin/sh\necho $$\n")
        liar.chmod(0o755)
        changed = scratch / "changed.tar.gz"
        with tarfile.open(changed, "w:gz", compresslevel=1) as tar:
            tar.add(root, root.name)
        bad = check_gpu(script, changed)
        assert bad.returncode == 1 and re.search(r"^liar .*DIFFERS", bad.stdout, re.M), bad


main(*sys.argv[1:])
