// What both sources of bases share.

struct Factor {
    i64 offset;
    int length;
    int width;
};
static_assert(LAYOUT_OF_Factor, "kernels.py has another Factor");

// The first warp: gram = L L^T with a ridge; the inverse of L, and what each column adds to those before it.
// `gram` is used up. All in shared memory.
static __device__ void factorise(double (*gram)[RANK], int width, double (*inverse)[RANK], double* added) {
    const int lane = threadIdx.x & 31;
    double largest = 0.0;
    for (int a = 0; a < width; ++a) largest = gram[a][a] > largest ? gram[a][a] : largest;
    __syncwarp();
    if (lane < width) gram[lane][lane] += RIDGE * largest;
    __syncwarp();
    for (int j = 0; j < width; ++j) {
        const double pivot = gram[j][j], root = sqrt(pivot);
        if (lane == 0) added[j] = pivot;
        __syncwarp();
        if (lane == j) gram[j][j] = root;
        if (lane > j && lane < width) gram[lane][j] /= root;
        __syncwarp();
        if (lane > j && lane < width)
            for (int k = j + 1; k <= lane; ++k) gram[lane][k] -= gram[lane][j] * gram[k][j];
        __syncwarp();
    }
    // Lane j has column j of the inverse.
    if (lane < RANK)
        for (int i = 0; i < RANK; ++i) {
            double rest = i == lane ? 1.0 : 0.0;
            if (i < lane || i >= width || lane >= width) {
                inverse[i][lane] = 0.0;
                continue;
            }
            for (int k = lane; k < i; ++k) rest -= gram[i][k] * inverse[k][lane];
            inverse[i][lane] = rest / gram[i][i];
        }
}
