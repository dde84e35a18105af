"""Programs that run an exported model: Python, JavaScript, C++, C# and Java.

The first line of each program names the API that it follows. Names given by the user are written
as escaped literals of the language, whatever characters they contain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ortlab.deploy.graph import Port

API = "1.19"
"""The onnxruntime release whose API the programs use; later releases still support it."""
JAVASCRIPT_API = "1.30"
SHOWN = 8
"""Number of values that a program prints of each output."""


@dataclass(frozen=True)
class Program:
    """Source of a program.

    Attributes:
        fence: Name of the language in a Markdown fence.
        language: Name of the language in text.
        is_run: Whether ortlab's tests run it.
        code: The source.
    """

    fence: str
    language: str
    is_run: bool
    code: str


@dataclass(frozen=True)
class _Type:
    """Names of an element type; empty if the language has no matching type."""

    javascript: str
    cpp: str = ""
    csharp: str = ""
    java: str = ""
    buffer: str = ""
    """Java's buffer class for the type."""


_TYPES = {
    "float32": _Type("Float32Array", "float", "float", "float", "FloatBuffer"),
    "float64": _Type("Float64Array", "double", "double", "double", "DoubleBuffer"),
    "int64": _Type("BigInt64Array", "int64_t", "long", "long", "LongBuffer"),
    "int32": _Type("Int32Array", "int32_t", "int", "int", "IntBuffer"),
    "int16": _Type("Int16Array", "int16_t", "short", "short", "ShortBuffer"),
    "int8": _Type("Int8Array", "int8_t", "sbyte", "byte", "ByteBuffer"),
    "uint8": _Type("Uint8Array", "uint8_t", "byte", "byte", "ByteBuffer"),
    "bool": _Type("Uint8Array", "bool", "bool", "byte", "ByteBuffer"),
}


def programs(
    inputs: Sequence[Port], outputs: Sequence[Port], sizes: Mapping[str, int], file: str
) -> list[Program]:
    """Return programs that run a model on placeholder values: 0.5 for floats, 1 for other types.

    Args:
        inputs: Inputs of the graph.
        outputs: Outputs of the graph.
        sizes: Values of the sizes that vary, by name.
        file: Name of the graph's file.

    Returns:
        The programs, without the languages that lack one of the element types.
    """
    made = [
        Program("python", "Python", True, _python(inputs, outputs, sizes, file)),
    ]
    if all(port.type in _TYPES for port in (*inputs, *outputs)):
        made += [
            Program("js", "JavaScript", True, _javascript(inputs, sizes, file)),
            Program("cpp", "C++", False, _cpp(inputs, outputs, sizes, file)),
            Program("csharp", "C#", False, _csharp(inputs, outputs, sizes, file)),
            Program("java", "Java", False, _java(inputs, outputs, sizes, file)),
        ]
    return made


def in_browser(port: Port) -> bool:
    """Return whether JavaScript has typed arrays of a port's type.

    Args:
        port: An input or an output.
    """
    return port.type in _TYPES


def fill(port: Port) -> float | int:
    """Return the placeholder value that a program fills an input with.

    Args:
        port: The input.
    """
    return 0.5 if port.type.startswith("float") else 1


def shape(port: Port, sizes: Mapping[str, int]) -> list[int]:
    """Return a port's shape with numbers for the sizes that vary.

    Args:
        port: An input or an output.
        sizes: Values of the sizes that vary, by name.
    """
    return [size if isinstance(size, int) else sizes[size] for size in port.shape]


# ---- names as literals ---------------------------------------------------------------------------


def python_literal(text: str) -> str:
    """Return a Python literal that has only ASCII characters.

    Args:
        text: The string.
    """
    return ascii(text)


def json_literal(text: str) -> str:
    r"""Return a literal for JavaScript, C# and Java, which know all escapes of JSON.

    These are ``\"``, ``\\``, ``\n`` and ``\uXXXX``.

    Args:
        text: The string.
    """
    return json.dumps(text)


def cpp_literal(text: str) -> str:
    r"""Return a UTF-8 literal for C++.

    All characters but letters, digits and _ become escapes of three octal digits, whose end does
    not depend on the next character.

    Args:
        text: The string.
    """
    letters = (chr(byte) for byte in text.encode())
    plain = (x if x.isascii() and (x.isalnum() or x == "_") else f"\\{ord(x):03o}" for x in letters)
    return f'"{"".join(plain)}"'


# ---- the languages -------------------------------------------------------------------------------


def _python(
    inputs: Sequence[Port], outputs: Sequence[Port], sizes: Mapping[str, int], file: str
) -> str:
    feeds = [
        f"    {python_literal(port.name)}: "
        f'np.full({shape(port, sizes)}, {fill(port)}, dtype="{port.type}"),'
        for port in inputs
    ]
    names = "\n".join(f"    {python_literal(port.name)}," for port in outputs)
    return f"""\
# onnxruntime {API}: pip install onnxruntime
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])
feeds = {{
{chr(10).join(feeds)}
}}
names = [
{names}
]
for name, value in zip(names, session.run(names, feeds)):
    print(name, list(value.shape), value.ravel()[:{SHOWN}].tolist())"""


def _javascript(inputs: Sequence[Port], sizes: Mapping[str, int], file: str) -> str:
    feeds = []
    for port in inputs:
        dims = shape(port, sizes)
        value = f"{fill(port)}n" if port.type == "int64" else f"{fill(port)}"
        data = f"new {_TYPES[port.type].javascript}({math.prod(dims)}).fill({value})"
        feeds.append(
            f"  [{json_literal(port.name)}]: new ort.Tensor({json_literal(port.type)}, {data}, "
            f"{dims}),"
        )
    return f"""\
// onnxruntime-node {JAVASCRIPT_API}: npm install onnxruntime-node; in a page onnxruntime-web
import * as ort from "onnxruntime-node";

const session = await ort.InferenceSession.create("{file}");
const feeds = {{
{chr(10).join(feeds)}
}};
const results = await session.run(feeds);
for (const [name, tensor] of Object.entries(results)) {{
  console.log(name, tensor.dims, Array.from(tensor.data.slice(0, {SHOWN}), Number));
}}"""


def _cpp(
    inputs: Sequence[Port], outputs: Sequence[Port], sizes: Mapping[str, int], file: str
) -> str:
    lines = []
    for i, port in enumerate(inputs):
        dims, kind = shape(port, sizes), _TYPES[port.type].cpp
        count, value = math.prod(dims), fill(port)
        lines.append(f"  std::vector<int64_t> shape{i} = {{{_listed(dims)}}};")
        if kind == "bool":  # std::vector<bool> has no array
            lines.append(f"  auto data{i} = std::make_unique<bool[]>({count});")
            lines.append(f"  std::fill_n(data{i}.get(), {count}, true);")
            data = f"data{i}.get()"
        else:
            lines.append(f"  std::vector<{kind}> data{i}({count}, {value});")
            data = f"data{i}.data()"
        lines.append(
            f"  feeds.push_back(Ort::Value::CreateTensor<{kind}>(\n"
            f"      memory, {data}, {count}, shape{i}.data(), shape{i}.size()));"
        )
    shown = [
        f"  show(outputs[{i}], found[{i}].GetTensorData<{_TYPES[port.type].cpp}>(),\n"
        f"       found[{i}].GetTensorTypeAndShapeInfo().GetElementCount());"
        for i, port in enumerate(outputs)
    ]
    return f"""\
// onnxruntime's C++ API, {API}; not tested
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <vector>

template <typename T>
void show(const char* name, const T* values, size_t count) {{
  std::cout << name;
  for (size_t i = 0; i < std::min<size_t>(count, {SHOWN}); ++i) std::cout << " " << +values[i];
  std::cout << "\\n";
}}

int main() {{
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "export");
  Ort::Session session(env, ORT_TSTR("{file}"), Ort::SessionOptions{{}});
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const char* inputs[] = {{{", ".join(cpp_literal(port.name) for port in inputs)}}};
  const char* outputs[] = {{{", ".join(cpp_literal(port.name) for port in outputs)}}};
  std::vector<Ort::Value> feeds;
{chr(10).join(lines)}
  auto found = session.Run(Ort::RunOptions{{nullptr}}, inputs, feeds.data(), feeds.size(), outputs,
                           {len(outputs)});
{chr(10).join(shown)}
}}"""


def _csharp(
    inputs: Sequence[Port], outputs: Sequence[Port], sizes: Mapping[str, int], file: str
) -> str:
    lines, feeds = [], []
    for i, port in enumerate(inputs):
        dims, kind = shape(port, sizes), _TYPES[port.type].csharp
        value = {"float": "0.5f", "double": "0.5", "bool": "true"}.get(kind, f"({kind})1")
        lines += [
            f"var data{i} = new {kind}[{math.prod(dims)}];",
            f"Array.Fill(data{i}, {value});",
            f"using var value{i} = OrtValue.CreateTensorValueFromMemory("
            f"data{i}, new long[] {{ {_listed(dims)} }});",
        ]
        feeds.append(f"    [{json_literal(port.name)}] = value{i},")
    names = ", ".join(json_literal(port.name) for port in outputs)
    shown = [
        f"Show({json_literal(port.name)}, results[{i}].GetTensorDataAsSpan<{kind}>().ToArray());"
        for i, port in enumerate(outputs)
        for kind in [_TYPES[port.type].csharp]
    ]
    return f"""\
// NuGet's Microsoft.ML.OnnxRuntime {API}; not tested
using System;
using System.Collections.Generic;
using System.Linq;
using Microsoft.ML.OnnxRuntime;

using var session = new InferenceSession("{file}");
{chr(10).join(lines)}
var feeds = new Dictionary<string, OrtValue>
{{
{chr(10).join(feeds)}
}};
using var options = new RunOptions();
using var results = session.Run(options, feeds, new[] {{ {names} }});
{chr(10).join(shown)}

static void Show<T>(string name, T[] values) =>
    Console.WriteLine($"{{name}} {{string.Join(", ", values.Take({SHOWN}))}}");"""


def _java(
    inputs: Sequence[Port], outputs: Sequence[Port], sizes: Mapping[str, int], file: str
) -> str:
    lines = []
    for i, port in enumerate(inputs):
        dims, known = shape(port, sizes), _TYPES[port.type]
        value = {"float": "0.5f", "double": "0.5"}.get(known.java, f"({known.java}) 1")
        tagged = f", OnnxJavaType.{port.type.upper()}" if known.buffer == "ByteBuffer" else ""
        lines += [
            f"      {known.java}[] data{i} = new {known.java}[{math.prod(dims)}];",
            f"      Arrays.fill(data{i}, {value});",
            f"      feeds.put({json_literal(port.name)}, OnnxTensor.createTensor(",
            f"          env, {known.buffer}.wrap(data{i}), "
            f"new long[] {{{_listed(dims)}}}{tagged}));",
        ]
    shown = [
        f"        show({json_literal(port.name)}, results.get({json_literal(port.name)}).get());"
        for port in outputs
    ]
    return f"""\
// Maven's com.microsoft.onnxruntime:onnxruntime {API}; not tested
import ai.onnxruntime.*;
import java.nio.*;
import java.util.*;

public class Run {{
  static void show(String name, OnnxValue value) throws OrtException {{
    TensorInfo info = (TensorInfo) value.getInfo();
    System.out.println(name + " " + Arrays.toString(info.getShape()) + " "
        + Arrays.deepToString(new Object[] {{value.getValue()}}));
  }}

  public static void main(String[] args) throws OrtException {{
    OrtEnvironment env = OrtEnvironment.getEnvironment();
    try (OrtSession session = env.createSession("{file}", new OrtSession.SessionOptions())) {{
      Map<String, OnnxTensor> feeds = new HashMap<>();
{chr(10).join(lines)}
      try (OrtSession.Result results = session.run(feeds)) {{
{chr(10).join(shown)}
      }}
    }}
  }}
}}"""


def _listed(dims: Sequence[int]) -> str:
    return ", ".join(map(str, dims))
