"""A table of JSON schemas: what an answer must follow, what cannot be held, and patterns of ECMA-262."""


def object_of(properties, *required, **more):
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": list(required or properties), **more}


def text(pattern, **more):
    """Return the schema of a string that a pattern is found in."""
    return {"type": "string", "pattern": pattern, **more}


ONE, TWO = {"const": 1}, {"const": 2}
NODE = object_of({"v": {"enum": [0, 1]}, "next": {"anyOf": [{"enum": [None, 0, 1]}, {"$ref": "#/$defs/node"}]}})
TREE = {"$ref": "#/$defs/node", "$defs": {"node": NODE}}

# answers to these end soon whatever the model is
HELD = {
    "digits": text(r"^\d{3}-\d{4}$"),
    "no spaces": text(r"^\S{3}$"),
    "not anchored": text("abc", maxLength=8),
    "anchored in front": text("^ab", maxLength=5),
    "a line feed": text(r"^a\nb$"),
    "a tab": text(r"^\t$"),
    "any characters": text("^.{1,5}$"),
    "not ASCII": text("^é{2}$"),
    "a quote": text('^["\\\\]{2}$'),
    "alternatives": text("^(ja|nein|vielleicht)$"),
    "escapes": text(r"^\x41\u00e9\/$"),
    "a class with what Rust reads as operators": text("^[a&&b~~c-]{4}$"),
    "a class in a class": text("^[[a]{3}$"),
    "length": {"type": "string", "minLength": 3, "maxLength": 5},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "integers": {"type": "integer", "minimum": -3, "maximum": 12},
    "an integer": {"type": "integer"},
    "64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "a large range": {"type": "integer", "minimum": -1e300, "exclusiveMaximum": 2},
    "exclusive": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 8},
    "multiples": {"type": "integer", "multipleOf": 5, "minimum": -20, "maximum": 100},
    "multiples of a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    "enum": {"enum": ["a", 1, None, {"b": [True]}, "ü\n"]},
    "const": {"const": {"a": [1, "x"]}},
    "types": {"type": ["boolean", "null"]},
    "a tuple and items": {"type": "array", "prefixItems": [ONE], "items": TWO, "minItems": 2, "maxItems": 3},
    "a tuple alone": {"type": "array", "prefixItems": [ONE, TWO], "items": False, "minItems": 2},
    "a list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "required without a property": object_of(
        {"a": ONE}, "a", "b", patternProperties={"^[b-z]$": TWO}, additionalProperties=False, maxProperties=4
    ),
    "optional": object_of({"a": ONE, "b": TWO}, "b"),
    "names that fit": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": ONE},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "all of them": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}], "multipleOf": 2},
    "recursion": TREE,
    "any of them": {"anyOf": [object_of({"a": ONE}), object_of({"b": TWO})]},
    "one of them, by a tag": {"oneOf": [object_of({"t": {"const": "x"}}), object_of({"t": {"enum": ["y", "z"]}})]},
    "one of them, by type": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "definitions": {"definitions": {"x/y": {"enum": [1, 2]}}, "$ref": "#/definitions/x~1y"},
    "beside a reference": {"$defs": {"n": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/n", "maximum": 9},
    "nested": object_of({"a": object_of({"b": {"type": "array", "items": text("^[xy]$"), "maxItems": 2}})}),
    "unknown words": {"type": "boolean", "title": "T", "x-other": 1, "default": 5},
    "yes": {"anyOf": [True, ONE], "type": "boolean"},
}

# schema, path of what cannot be held
REFUSED = {
    "unique items": ({"type": "array", "uniqueItems": True}, "/uniqueItems"),
    "not": (object_of({"a": {"not": {"const": 3}}}), "/properties/a/not"),
    "if": ({"if": ONE, "then": ONE}, "/if"),
    "contains": ({"type": "array", "items": {"contains": ONE}}, "/items/contains"),
    "names of properties": ({"type": "object", "propertyNames": {"maxLength": 2}}, "/propertyNames"),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    "unevaluated": (object_of({"a": {"unevaluatedProperties": False}}), "/properties/a/unevaluatedProperties"),
    "one of them": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/oneOf"),
    "least properties": ({"type": "object", "additionalProperties": ONE, "minProperties": 2}, "/minProperties"),
    "a format": (object_of({"a/b": {"type": "string", "format": "path"}}), "/properties/a~1b/format"),
    "look around": ({"items": [{}, {"type": "string", "pattern": "(?=a)b"}]}, "/items/1/pattern"),
    "word borders": (text(r"\babc"), "/pattern"),
    "a large multiple": (object_of({"a": {"type": "integer", "multipleOf": 99999989}}), "/properties/a/multipleOf"),
    "digits of a multiple": ({"type": "number", "multipleOf": 1e-30}, "/multipleOf"),
    "another document": (object_of({"a": {"$ref": "https://example.com/x"}}), "/properties/a/$ref"),
    "in a definition": ({"$defs": {"x": {"not": {}}}, "items": {"$ref": "#/$defs/x"}}, "/$defs/x/not"),
}

# not a schema, or one that allows nothing: refused with strict and without, with a part of the message
WRONG = [
    ("{", "not JSON"),
    ("7", "must be an object"),
    (False, "false allows nothing"),
    ({"type": "nonsense"}, "nonsense"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
    (object_of({"a": False}), "'a' is unsatisfiable"),
    ({"type": "object", "properties": []}, "properties"),
    ({"allOf": 3}, "allOf"),
    ({"format": []}, "format"),
    ('{"type": "number", "minimum": NaN}', "not JSON"),
    ('{"const": "\\ud800"}', "not JSON"),
    ({"type": "array", "prefixItems": [3]}, "schema must be"),
    ({"type": "object", "properties": {"a": 1}, "required": [["a"]]}, ""),
]
