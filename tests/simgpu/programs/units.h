#pragma once

void LaunchSecond(int* result);
