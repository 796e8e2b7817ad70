package elasticsearch

import "testing"

// TestBuffers: only a buffer whose requests have all been answered is used again; of others
// a client's transport may still be reading.
func TestBuffers(t *testing.T) {
	sent, failed, unsent := &chunk{buf: []byte("sent")}, &chunk{buf: []byte("failed"), failed: true}, &chunk{buf: []byte("unsent")}
	tx := &Tx{where: map[docKey]spot{}}
	tx.lanes[0].chunks, tx.lanes[1].chunks = []*chunk{sent}, []*chunk{failed}
	tx.reset()
	tx.lanes[0].chunks = append(tx.lanes[0].chunks, unsent)
	tx.close()
	for c, want := range map[*chunk]string{sent: "", failed: "failed", unsent: "unsent"} {
		if string(c.buf) != want { // one that is given back is emptied
			t.Errorf("a buffer holds %q, want %q", c.buf, want)
		}
	}
}
