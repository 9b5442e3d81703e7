#!/usr/bin/env python3
"""Write JSON schemas for kubeconform: of the kinds of Kubernetes, and of custom resources.

    tests/tools/schemas.py SWAGGER FOLDER [CRD...]

SWAGGER is `api/openapi-spec/swagger.json` of Kubernetes. FOLDER gets a file `GROUP-KIND-VERSION.json` for each kind, in lower case.
kubeconform calls the group of Kubernetes' own `v1` by that name too. A field that a type does not list is an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

PREFIX = "#/definitions/"
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def closed(schema: Any) -> Any:
    """The schema without room for other fields. Types that JSON schema lacks become the types that they stand for."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    # Names of fields may be words of JSON schema.
    result = {
        word: {name: closed(inner) for name, inner in value.items()} if word == "properties" else closed(value)
        for word, value in schema.items()
        if word not in ("description", "default")
    }
    if schema.get("format") == "int-or-string":
        result = {"type": ["string", "integer"]}
    if schema.get("nullable"):
        result = {"anyOf": [result, {"type": "null"}]}
    elif "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def references(schema: Any) -> Iterator[str]:
    """Names of the definitions that a schema uses itself."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield reference.removeprefix(PREFIX)
    values = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    for inner in values:
        yield from references(inner)


def whole(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of this name, with all definitions that it needs."""
    found: dict[str, Any] = {}
    open_names = [name]
    while open_names:
        one = open_names.pop()
        if one not in found:
            found[one] = definitions[one]
            open_names.extend(references(definitions[one]))
    return {"$ref": PREFIX + name, "definitions": found}


def write(folder: Path, kind: dict[str, str], schema: dict[str, Any]) -> None:
    name = f"{kind['group'] or kind['version']}-{kind['kind']}-{kind['version']}.json"
    (folder / name.lower()).write_text(json.dumps(schema))


def main(swagger: str, to: str, *crds: str) -> None:
    folder = Path(to)
    definitions = {name: closed(schema) for name, schema in json.loads(Path(swagger).read_text())["definitions"].items()}
    # The API server takes a number for a quantity too.
    definitions[QUANTITY] = {"type": ["string", "number"]}
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            write(folder, kind, whole(name, definitions))
    for crd in crds:
        spec = yaml.safe_load(Path(crd).read_text())["spec"]
        for version in spec["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            # The API server adds the rest of these.
            schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
            write(folder, {"group": spec["group"], "kind": spec["names"]["kind"], "version": version["name"]}, schema)


if __name__ == "__main__":
    main(*sys.argv[1:])
