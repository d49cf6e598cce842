"""Which tests took how long, in the last `make test` or `make test-all`.

python -m tests.durations
"""

import collections
import pathlib
import sys
from xml.etree import ElementTree

REPORT = pathlib.Path("out/tests.xml")


def main(report: pathlib.Path = REPORT) -> None:
    if not report.exists():
        sys.exit(f"There is no {report}: run `make test` or `make test-all` first, which write it.")
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    files: dict[str, float] = collections.Counter()
    tests: dict[str, float] = collections.Counter()
    for case in suite.iter("testcase"):
        files[case.attrib["classname"]] += float(case.attrib["time"])
        tests[f"{case.attrib['classname']}::{case.attrib['name']}"] += float(case.attrib["time"])
    print("seconds  the slowest tests")
    for name, seconds in tests.most_common(10):
        print(f"{seconds:7.1f}  {name}")
    print("seconds  by file")
    for name, seconds in files.most_common():
        print(f"{seconds:7.1f}  {name}")
    wall = float(suite.attrib["time"])
    print(f"{suite.attrib['tests']} tests, {wall:.0f} seconds, {sum(files.values()):.0f} of tests")


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
