package serve

import (
	"bufio"
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"

	commonpb "go.temporal.io/api/common/v1"
	"google.golang.org/protobuf/proto"
)

// Metadata of encrypted payloads.
const (
	encodingName = "encoding"
	encrypted    = "binary/encrypted"
	keyName      = "encryption-key-id"
)

// codec encrypts payloads with AES-256 in Galois/counter mode, whole and with their
// metadata. It is a converter.PayloadCodec.
type codec struct {
	current string // the key that encrypts
	keys    map[string]cipher.AEAD
}

// readKeys reads a file of keys, one a line: a name, a space, and 32 random bytes in
// base64. The first encrypts, all decrypt, so that a key is replaced by one put above
// it. Empty lines and lines that begin with # are left out.
func readKeys(path string) (*codec, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("keys of Temporal's payloads: %w", err)
	}
	c := &codec{keys: map[string]cipher.AEAD{}}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, encoded, _ := strings.Cut(line, " ")
		key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(encoded))
		// The error is not told: it may quote the key.
		if err != nil || len(key) != 32 || name == "" {
			return nil, fmt.Errorf("%s:%d: write a name, a space and 32 bytes in base64, as printed by: openssl rand -base64 32", path, n)
		}
		if c.keys[name] != nil {
			return nil, fmt.Errorf("%s:%d: a second key of the name %s", path, n, name)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, err
		}
		if c.keys[name], err = cipher.NewGCM(block); err != nil {
			return nil, err
		}
		if c.current == "" {
			c.current = name
		}
	}
	if c.current == "" {
		return nil, fmt.Errorf("%s holds no key", path)
	}
	return c, nil
}

// Encode encrypts payloads.
func (c *codec) Encode(in []*commonpb.Payload) ([]*commonpb.Payload, error) {
	out := make([]*commonpb.Payload, len(in))
	for i, p := range in {
		plain, err := proto.Marshal(p)
		if err != nil {
			return nil, err
		}
		nonce := make([]byte, c.keys[c.current].NonceSize())
		_, _ = rand.Read(nonce) // it does not fail
		out[i] = &commonpb.Payload{
			Metadata: map[string][]byte{encodingName: []byte(encrypted), keyName: []byte(c.current)},
			Data:     c.keys[c.current].Seal(nonce, nonce, plain, []byte(c.current)),
		}
	}
	return out, nil
}

// Decode decrypts payloads, and leaves alone those that were never encrypted.
func (c *codec) Decode(in []*commonpb.Payload) ([]*commonpb.Payload, error) {
	out := make([]*commonpb.Payload, len(in))
	for i, p := range in {
		if string(p.GetMetadata()[encodingName]) != encrypted {
			out[i] = p
			continue
		}
		name := string(p.GetMetadata()[keyName])
		key := c.keys[name]
		if key == nil {
			return nil, fmt.Errorf("a payload was encrypted with the key %q, which is not in the file of keys: put it back below the others", name)
		}
		if len(p.Data) < key.NonceSize() {
			return nil, errors.New("an encrypted payload is too short")
		}
		plain, err := key.Open(nil, p.Data[:key.NonceSize()], p.Data[key.NonceSize():], []byte(name))
		if err != nil {
			return nil, fmt.Errorf("a payload cannot be decrypted with the key %q: it was changed, or the key is another of that name", name)
		}
		out[i] = &commonpb.Payload{}
		if err := proto.Unmarshal(plain, out[i]); err != nil {
			return nil, fmt.Errorf("an encrypted payload cannot be read: %w", err)
		}
	}
	return out, nil
}
