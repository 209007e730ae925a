package client

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Columns is a row in the order of its columns; nil where there is none.
type Columns []Column

// Column is a value of a row.
type Column struct {
	Name  string
	Value *string // PostgreSQL's text, nil for NULL
}

// Get is the value of a column, nil for NULL and where there is no such column.
func (c Columns) Get(name string) *string {
	for _, x := range c {
		if x.Name == name {
			return x.Value
		}
	}
	return nil
}

// UnmarshalJSON reads an object and keeps its order.
func (c *Columns) UnmarshalJSON(raw []byte) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	start, err := dec.Token()
	if err != nil || start == nil {
		return err
	}
	if start != json.Delim('{') {
		return fmt.Errorf("a row that is no object: %.20s", raw)
	}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return err
		}
		x := Column{Name: name.(string)} // the decoder takes nothing else for a name
		if err := dec.Decode(&x.Value); err != nil {
			return err
		}
		*c = append(*c, x)
	}
	return nil
}

// MarshalJSON writes an object in that order.
func (c Columns) MarshalJSON() ([]byte, error) {
	if c == nil {
		return []byte("null"), nil
	}
	var b bytes.Buffer
	b.WriteByte('{')
	for i, x := range c {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := json.Marshal(x.Name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(x.Value)
		if err != nil {
			return nil, err
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
