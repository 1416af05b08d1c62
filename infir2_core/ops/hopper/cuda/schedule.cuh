// Which K blocks of which output tiles each worker of a GEMM computes, so that all of them end together.
//
// Whole waves of tiles are dealt out one tile a worker. The tiles that are left would keep some workers idle; they are
// cut along K instead, in ranges of equal length that go through them one after another ("stream-K", arXiv 2301.03598).
// A range has no gaps, so only its first piece may lie within a tile: that one goes to the worker that has the tile's
// beginning, which adds all of them in the order of K.
constexpr int LEAST = 8;  // K blocks of a range of less than a tile; shorter ones cost more to hand over than to compute
constexpr int BAND = 8;   // tiles along n that are computed together with those below them

struct Piece { int tile, from, to; };  // K blocks [from, to)

struct Schedule {
    int tiles, depth, workers;  // depth: K blocks of a tile

    __device__ __forceinline__ int waves() const { return tiles / workers; }
    __device__ __forceinline__ int left() const { return tiles % workers * depth; }
    __device__ __forceinline__ int sharers() const { return max(max(1, tiles % workers), min(workers, left() / LEAST)); }
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
    // How far `other` and the workers before it get along K in this piece's tile, which another one has begun.
    __device__ __forceinline__ int reached(const Piece& p, int other) const {
        const int end = (p.tile - waves() * workers + 1) * depth;  // of the tile, among what is left
        return depth - (end - min(end, border(other + 1)));
    }
};

struct Corner { int row, col; };  // where a tile of HIGH x WIDE begins
template <int HIGH, int WIDE>
__device__ __forceinline__ Corner corner(int tile, int down, int across) {  // of down x across tiles
    const int band = tile / (down * BAND), first = band * BAND, wide = min(BAND, across - first);
    const int within = tile - band * down * BAND;
    return {within / wide * HIGH, (first + within % wide) * WIDE};
}
