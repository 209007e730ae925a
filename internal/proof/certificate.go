package proof

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
)

// Signed is a certificate: the statement in canonical JSON, and the signature over
// just those bytes.
type Signed struct {
	Statement json.RawMessage `json:"statement"`
	Key       string          `json:"key"`       // the public key, base64
	Signature string          `json:"signature"` // Ed25519, base64
}

// Canonical is the one JSON text of a value: members sorted by name, no white space,
// numbers as they are. Statements hold integers and texts only, so that nothing is
// left to how a number is printed.
func Canonical(v any) ([]byte, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return canonical(raw)
}

func canonical(raw []byte) ([]byte, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, err
	}
	if dec.More() {
		return nil, errors.New("there is something after the JSON value")
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(tree); err != nil { // maps are written sorted by name
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Sign makes a certificate of a statement.
func Sign(key ed25519.PrivateKey, statement any) (*Signed, error) {
	text, err := Canonical(statement)
	if err != nil {
		return nil, err
	}
	return &Signed{Statement: text, Key: PublicKey(key.Public().(ed25519.PublicKey)),
		Signature: base64.StdEncoding.EncodeToString(ed25519.Sign(key, text))}, nil
}

// PublicKey is a key as certificates show it.
func PublicKey(key ed25519.PublicKey) string { return base64.StdEncoding.EncodeToString(key) }

// Verify checks a certificate, in whatever layout its JSON came, against the public
// key of the installation that is said to have made it: the key in the certificate
// alone proves nothing.
func Verify(certificate []byte, trusted string) (*Signed, error) {
	var s Signed
	if err := json.Unmarshal(certificate, &s); err != nil {
		return nil, fmt.Errorf("it is no certificate: %w", err)
	}
	if s.Key != trusted {
		return nil, fmt.Errorf("it is signed with the key %s, not with %s", s.Key, trusted)
	}
	key, err := base64.StdEncoding.DecodeString(s.Key)
	if err != nil || len(key) != ed25519.PublicKeySize {
		return nil, errors.New("its key is no Ed25519 key")
	}
	signature, err := base64.StdEncoding.DecodeString(s.Signature)
	if err != nil {
		return nil, errors.New("its signature is no base64")
	}
	text, err := canonical(s.Statement)
	if err != nil {
		return nil, fmt.Errorf("its statement is no JSON: %w", err)
	}
	if !ed25519.Verify(key, text, signature) {
		return nil, errors.New("its signature does not belong to its statement: one of them was changed")
	}
	s.Statement = text
	return &s, nil
}
