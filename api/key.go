package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"regexp"
	"slices"
	"strings"

	"backfill/internal/backfill"
)

// parseKey reads the key of one row: a JSON array in key order, or an object by
// column name. Numbers keep their spelling; nothing passes through a float.
func parseKey(p *backfill.Panel, raw []byte) (backfill.Key, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var given any
	if err := dec.Decode(&given); err != nil || dec.Decode(new(any)) != io.EOF {
		return nil, fieldError(backfill.Invalid, "key", "is not JSON: give an array in key order or an object by column")
	}
	columns := p.Source.Key
	values := make([]any, len(columns))
	switch given := given.(type) {
	case []any:
		if len(given) != len(columns) {
			return nil, wrongArity(p, len(given))
		}
		copy(values, given)
	case map[string]any:
		if err := byColumn(p, given, values); err != nil {
			return nil, err
		}
	default:
		return nil, fieldError(backfill.Invalid, "key", "give an array in key order or an object by column")
	}
	key := make(backfill.Key, len(columns))
	var wrong []backfill.FieldError
	for i, column := range columns {
		typ := ""
		if i < len(p.Source.KeyTypes) {
			typ = p.Source.KeyTypes[i]
		}
		text, problem := keyText(values[i], typ)
		if problem != "" {
			wrong = append(wrong, backfill.FieldError{Field: "key." + column, Message: problem})
		}
		key[i] = text
	}
	return key, invalidKey(p, wrong)
}

// keyOf is parseKey that has PostgreSQL judge the types which fits does not know in full.
func (s *Service) keyOf(ctx context.Context, p *backfill.Panel, raw []byte) (backfill.Key, error) {
	key, err := parseKey(p, raw)
	if err != nil {
		return nil, err
	}
	var wrong []backfill.FieldError
	for i, typ := range p.Source.KeyTypes {
		if slices.Contains(judgedHere, shortType(typ)) {
			continue
		}
		ok, err := s.Store.Reads(ctx, typ, key[i])
		if err != nil {
			return nil, err
		}
		if !ok {
			wrong = append(wrong, backfill.FieldError{Field: "key." + p.Source.Key[i], Message: fmt.Sprintf("is %.40q, which is no %s", key[i], typ)})
		}
	}
	return key, invalidKey(p, wrong)
}

func wrongArity(p *backfill.Panel, given int) error {
	return fieldError(backfill.Invalid, "key", fmt.Sprintf("the key of %s is (%s), %s: got %d",
		p.Table.Name, strings.Join(p.Source.Key, ", "), plural(len(p.Source.Key), "value"), given))
}

func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

func byColumn(p *backfill.Panel, given map[string]any, values []any) error {
	var wrong []backfill.FieldError
	for i, column := range p.Source.Key {
		v, ok := given[column]
		if !ok {
			wrong = append(wrong, backfill.FieldError{Field: "key." + column, Message: "is missing"})
		}
		values[i] = v
		delete(given, column)
	}
	for column := range given {
		wrong = append(wrong, backfill.FieldError{Field: "key." + column, Message: "is not a key column"})
	}
	return invalidKey(p, wrong)
}

func invalidKey(p *backfill.Panel, wrong []backfill.FieldError) error {
	if len(wrong) == 0 {
		return nil
	}
	return &backfill.Error{Code: backfill.Invalid, Fields: wrong,
		Message: fmt.Sprintf("the key of %s is (%s): %s %s", p.Table.Name, strings.Join(p.Source.Key, ", "), wrong[0].Field, wrong[0].Message)}
}

// keyText is the text of one key value, or what is wrong with it.
func keyText(v any, typ string) (text, problem string) {
	switch v := v.(type) {
	case string:
		text = v
	case json.Number:
		text = v.String()
	case bool:
		text = fmt.Sprint(v)
		if shortType(typ) == "boolean" {
			text = text[:1] // as PostgreSQL prints it
		}
	case nil:
		return "", "is null: a key column never is"
	default:
		return "", "must be a string, a number or a boolean"
	}
	if !storable(text) {
		return "", "holds characters that no text in PostgreSQL can hold"
	}
	if !fits(text, shortType(typ)) {
		return "", fmt.Sprintf("is %.40q, which is no %s", text, typ)
	}
	return text, ""
}

// aliases are the spellings of a type that catalog and SQL use for one thing.
var aliases = map[string]string{
	"int2": "smallint", "int4": "integer", "int": "integer", "int8": "bigint", "decimal": "numeric", "bool": "boolean",
	"timestamp": "timestamp without time zone", "timestamptz": "timestamp with time zone",
}

func shortType(typ string) string {
	typ = strings.TrimPrefix(typ, "pg_catalog.")
	if name, ok := aliases[typ]; ok {
		return name
	}
	return typ
}

var (
	integerShape = regexp.MustCompile(`^[+-]?(0[xob][0-9a-f_]+|[0-9_]+)$`)
	numericShape = regexp.MustCompile(`^[+-]?(0[xob][0-9a-f_]+|([0-9_]+\.?[0-9_]*|\.[0-9_]+)(e[+-]?[0-9_]+)?|nan|inf|infinity)$`)
	booleanShape = regexp.MustCompile(`^(t|tr|tru|true|f|fa|fal|fals|false|y|ye|yes|n|no|on|of|off|0|1)$`)
	uuidShape    = regexp.MustCompile(`^\{?([0-9a-f]{4}-?){7}[0-9a-f]{4}\}?$`)
	timeShape    = regexp.MustCompile(`[0-9]|infinity|epoch|now|today|tomorrow|yesterday`)

	integerBits = map[string]uint{"smallint": 15, "integer": 31, "bigint": 63}
)

// judgedHere are the types that fits knows in full. A source newer than the control database
// reads more spellings of numbers than that does.
var judgedHere = []string{"smallint", "integer", "bigint", "numeric", "boolean", "uuid"}

// fits is false only for what PostgreSQL surely refuses as that type; the agent,
// which asks the database, has the last word.
func fits(text, typ string) bool {
	s := strings.ToLower(strings.TrimSpace(text))
	switch typ {
	case "smallint", "integer", "bigint":
		return integerShape.MatchString(s) && inRange(s, integerBits[typ])
	case "numeric":
		return numericShape.MatchString(s)
	case "boolean":
		return booleanShape.MatchString(s)
	case "uuid":
		return uuidShape.MatchString(s)
	case "date", "timestamp without time zone", "timestamp with time zone":
		return timeShape.MatchString(s)
	}
	return true
}

func inRange(s string, bits uint) bool {
	if len(s) > 100 {
		return false
	}
	n, ok := new(big.Int).SetString(strings.ReplaceAll(s, "_", ""), 10)
	if !ok {
		return true // another base, which newer servers read
	}
	limit := new(big.Int).Lsh(big.NewInt(1), bits)
	return n.Cmp(limit) < 0 && n.Cmp(limit.Neg(limit)) >= 0
}
