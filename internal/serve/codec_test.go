package serve

import (
	"bytes"
	"encoding/base64"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	commonpb "go.temporal.io/api/common/v1"
)

// keyLine is a line of a file of keys; the key is one byte over and over.
func keyLine(name string, b byte) string {
	return name + " " + base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, 32)) + "\n"
}

func keyFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestPayloadsAreEncryptedByTheFirstKeyAndDecryptedByAny(t *testing.T) {
	old, err := readKeys(keyFile(t, keyLine("old", 1)))
	require.NoError(t, err)
	both, err := readKeys(keyFile(t, "# newest first\n\n"+keyLine("new", 2)+keyLine("old", 1)))
	require.NoError(t, err)
	secret := []*commonpb.Payload{{Metadata: map[string][]byte{"encoding": []byte("json/plain")}, Data: []byte(`"key 4711"`)}}

	fromOld, err := old.Encode(secret)
	require.NoError(t, err)
	again, err := old.Encode(secret)
	require.NoError(t, err)
	require.NotEqual(t, fromOld[0].Data, again[0].Data, "a nonce is used once")
	require.NotContains(t, string(fromOld[0].Data), "4711")
	require.NotContains(t, string(fromOld[0].Data), "json/plain")
	plain, err := both.Decode(fromOld)
	require.NoError(t, err)
	require.Equal(t, secret[0].Data, plain[0].Data)

	fromNew, err := both.Encode(secret)
	require.NoError(t, err)
	_, err = old.Decode(fromNew)
	require.ErrorContains(t, err, `the key "new", which is not in the file`)
	// One that was there before encryption was turned on.
	plain, err = both.Decode(secret)
	require.NoError(t, err)
	require.Equal(t, secret, plain)

	for i := range fromNew[0].Data {
		changed := bytes.Clone(fromNew[0].Data)
		changed[i] ^= 1
		_, err = both.Decode([]*commonpb.Payload{{Metadata: fromNew[0].Metadata, Data: changed}})
		require.ErrorContains(t, err, "it was changed")
	}
	_, err = both.Decode([]*commonpb.Payload{{Metadata: fromNew[0].Metadata, Data: []byte("short")}})
	require.ErrorContains(t, err, "too short")
}

func TestFilesOfKeysThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct{ text, says string }{
		"empty":     {"# none\n", "holds no key"},
		"no name":   {keyLine("", 1), ":1: write a name"},
		"no key":    {"\nold\n", ":2: write a name"},
		"short key": {"old " + base64.StdEncoding.EncodeToString([]byte("short")), "32 bytes"},
		"one twice": {keyLine("old", 1) + keyLine("old", 2), ":2: a second key of the name old"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readKeys(keyFile(t, c.text))
			require.ErrorContains(t, err, c.says)
			require.NotContains(t, err.Error(), "c2hvcnQ", "the key is not told")
		})
	}
	_, err := readKeys(filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "no such file")
}
