// Which K blocks of which output tiles each worker of a GEMM computes, so that all of them end together.
//
// Whole waves of tiles are dealt out one tile a worker. The tiles that are left would keep some workers idle; they are
// cut along K instead, in ranges of equal length that go through them one after another ("stream-K", arXiv 2301.03598).
// A range is shorter than a tile, so a worker has at most one piece that does not begin a tile: that one goes to the
// worker that has the tile's beginning, which adds all of them in the order of K.
constexpr int LEAST = 8;  // K blocks of a range; shorter ones would cost more to hand over than to compute

struct Piece { int tile, from, to; };  // K blocks [from, to)

struct Schedule {
    int tiles, depth, workers;  // depth: K blocks of a tile

    __device__ __forceinline__ int waves() const { return tiles / workers; }
    __device__ __forceinline__ int left() const { return tiles % workers * depth; }
    __device__ __forceinline__ int sharers() const { return max(1, min(workers, left() / LEAST)); }
    __device__ __forceinline__ int border(int worker) const {  // where its range begins among what is left
        const int n = sharers();
        return worker < n ? left() * worker / n : left();  // fits: less than workers * workers * depth
    }
    // K blocks of all pieces of a worker.
    __device__ __forceinline__ int work(int worker) const {
        return waves() * depth + border(worker + 1) - border(worker);
    }
    // The piece that begins with the `done`th K block of this worker.
    __device__ __forceinline__ Piece piece(int worker, int done) const {
        const int whole = waves() * depth;
        if (done < whole) return {done / depth * workers + worker, 0, depth};
        const int at = border(worker) + done - whole, end = border(worker + 1);
        return {waves() * workers + at / depth, at % depth, min(depth, at % depth + end - at)};
    }
    // Where, among what is left, the tile of this piece ends: workers after this one share it up to there.
    __device__ __forceinline__ int end_of(const Piece& p) const { return (p.tile - waves() * workers + 1) * depth; }
};
