"""Schemas of the custom resources that the chart uses, with the fields that it uses.

kubernetes-validate has the kinds of Kubernetes only. These are written from the API references of the Prometheus
operator (monitoring.coreos.com/v1) and of cert-manager (cert-manager.io/v1).
"""

from __future__ import annotations

from typing import Any

_TEXT = {"type": "string", "minLength": 1}
_DURATION = {"type": "string", "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?$", "minLength": 2}


def _object(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": fields, "required": list(required)}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


_LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}
_EXPRESSION = _object(
    {"key": _TEXT, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}, "values": _list(_TEXT)},
    "key", "operator",
)  # fmt: skip
_SELECTOR = _object({"matchLabels": _LABELS, "matchExpressions": _list(_EXPRESSION)})
_METADATA = _object({"name": _TEXT, "labels": _LABELS}, "name")


def _resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    fields = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": _METADATA, "spec": spec}
    return _object(fields, *fields)


SCHEMAS = {
    "ServiceMonitor": _resource(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        _object(
            {
                "jobLabel": _TEXT,
                "selector": _SELECTOR,
                "endpoints": _list(_object({"port": _TEXT, "path": _TEXT, "interval": _DURATION}, "port")),
            },
            "selector", "endpoints",
        ),
    ),
    "Certificate": _resource(
        "cert-manager.io/v1",
        "Certificate",
        _object(
            {
                "secretName": _TEXT,
                "duration": _DURATION,
                "privateKey": _object(
                    {
                        "algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]},
                        "size": {"type": "integer"},
                        "rotationPolicy": {"enum": ["Never", "Always"]},
                    }
                ),
                "usages": _list({"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}),
                "uris": _list(_TEXT),
                "dnsNames": _list(_TEXT),
                "issuerRef": _object({"name": _TEXT, "kind": _TEXT, "group": _TEXT}, "name"),
            },
            "secretName", "issuerRef",
        ),
    ),
}  # fmt: skip
