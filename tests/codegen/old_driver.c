// A driver of long ago, for driver_test.cc.
__attribute__((visibility("default"))) int cuInit(unsigned flags) { return (int)flags + 17; }
