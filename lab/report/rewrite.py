"""Rewrite the report's tables once, in the columns and with the names of today. No number changes.

    python lab/report/rewrite.py

Rows of measurements lose the columns init_weights and changes, which were empty, and have the
labels with which their figures are drawn; RoPE factor 1 is written as "", as trained. Rows of runs
lose what lab.compare no longer reads, and rows of lab.bench and lab.tiles have their columns.
"""
from pathlib import Path

from support.tables import read_table, write_table

FOLDER = Path(__file__).parent
GONE = ("init_weights", "changes", "named_by", "equations", "classes", "versions", "best",
        "best_step")
LATENCY = ("model", "parameters", "what", "setting", "length", "machine", "ms", "parts_ms")
ABLATIONS = {"multiscreen": "Multiscreen", "multiscreen:rope": "MiPE → RoPE",
             "multiscreen:nope": "MiPE → NoPE", "multiscreen:no-tanhnorm": "w/o TanhNorm",
             "multiscreen:no-gate": "w/o gate", "multiscreen:fixed-r": "r fixed to 1",
             "multiscreen:compete": "keys compete", "multiscreen:softmax": "softmax",
             "multiscreen:softmax-rope": "softmax, RoPE"}
SMALL = {"transformer:4,4,96": "Transformer, RoPE",
         "transformer:4,4,96:local": "Transformer, local"}
TEXT = {"transformer:6,4,112": "Transformer, RoPE",
        "transformer:6,4,112:local": "Transformer, local",
        "transformer:6,4,112:screening": "Transformer that screens"}
NAMES = {
    "copying": {"multiscreen": "Multiscreen"} | TEXT,
    "copying_steps": {"multiscreen": "Multiscreen"} | TEXT,
    "copying_scaled": TEXT,
    "copying_lr0.0625": {"multiscreen": "Multiscreen at 2^-4"},
    "copying_steps_lr0.0625": {"multiscreen": "Multiscreen at 2^-4"},
    "copying_others": {"multiscreen": "Multiscreen, w_th 16"} | TEXT,
    "copying_steps_others": {"multiscreen": "Multiscreen, w_th 16"} | TEXT,
    "long_context": {"multiscreen": "Multiscreen, 0.93M", "transformer:8M": "Transformer, 1.2M"},
    "long_context_w_th16": {"multiscreen": "Multiscreen, w_th 16"},
    "long_context_ablations": ABLATIONS,
    "abcdigits": {"multiscreen": "Multiscreen"} | SMALL,
    "abcdigits_ablations": ABLATIONS, "competition": ABLATIONS,
    "no_gate_lr0.0078125": {"multiscreen:no-gate": "w/o gate, 2^-7"},
    "no_gate_lr0.03125": {"multiscreen:no-gate": "w/o gate, 2^-5"},
    "passkey": {"multiscreen": "Multiscreen"} | SMALL,
    "mechanisms": {"multiscreen": "Multiscreen"}}


def main():
    for path in sorted(FOLDER.glob("*.tsv")):
        names, rows = NAMES.get(path.stem, {}), []
        for row in read_table(path):
            row = {name: x for name, x in row.items() if name not in GONE}
            if "run" not in row:
                name = row["model"].removeprefix("transformer=")
                row["model"] = names.get(name, name)
            if row.get("factor") == "1":
                row["factor"] = ""
            if path.stem == "mechanisms":
                del row["task"], row["lr"]
            if path.stem.startswith("latency"):
                row |= {"what": row.get("what", "forward").replace("-", ", "),
                        "parts_ms": row.get("alone_ms", "")}
                row = {name: row.get(name, "") for name in LATENCY}
            # The steps of the mechanisms were timed while twenty runs shared a GPU.
            if row.get("what") != "ms":
                rows.append(row)
        write_table(path, rows)
    path = FOLDER / "text_multiscreen-0/tiles.tsv"
    write_table(path, [row | {"seq_len": "256"} for row in read_table(path)])


if __name__ == "__main__":
    main()
